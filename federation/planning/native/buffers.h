/* Buffers of int64 that Python hands over, held until a call ends. */
#ifndef MSD_BUFFERS_H
#define MSD_BUFFERS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>

#define BUFFERS_MAX 12

struct buffers {
    Py_buffer held[BUFFERS_MAX];
    int count;
};

void release_buffers(struct buffers *b);

/* Takes a C-contiguous buffer of int64; `items` is what it must hold, or -1 to be told. */
int64_t *take(struct buffers *b, PyObject *object, const char *name, int is_written,
              int64_t *items);

/* Releases what is held; returns None, or NULL with a MemoryError where a call failed. */
PyObject *ended(struct buffers *held, int failed);

/* Releases what is held and raises a ValueError. */
void refuse(struct buffers *held, const char *text);

#endif
