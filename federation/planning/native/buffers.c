#include "buffers.h"

void release_buffers(struct buffers *b)
{
    while (b->count > 0)
        PyBuffer_Release(&b->held[--b->count]);
}

int64_t *take(struct buffers *b, PyObject *object, const char *name, int is_written,
              int64_t *items)
{
    Py_buffer *buffer = &b->held[b->count];
    if (PyObject_GetBuffer(object, buffer, is_written ? PyBUF_WRITABLE : PyBUF_SIMPLE) < 0)
        return NULL;
    b->count++;
    if ((uintptr_t)buffer->buf % 8 || buffer->len % 8 ||
        (*items >= 0 && buffer->len / 8 != *items)) {
        PyErr_Format(PyExc_ValueError, "%s: %zd bytes where %lld int64 are expected", name,
                     buffer->len, (long long)*items);
        return NULL;
    }
    *items = buffer->len / 8;
    static int64_t nothing;
    return buffer->buf ? buffer->buf : &nothing;
}

PyObject *ended(struct buffers *held, int failed)
{
    release_buffers(held);
    if (failed)
        return PyErr_NoMemory();
    Py_RETURN_NONE;
}

void refuse(struct buffers *held, const char *text)
{
    release_buffers(held);
    PyErr_SetString(PyExc_ValueError, text);
}
