/* The module: its methods, and the stamp of the sources it was built of. */
#include "planning.h"

static PyMethodDef methods[] = {
    {"fill_tokens", fill_tokens, METH_VARARGS,
     "fill_tokens(sizes, space, room, found): best fit by free tokens; space and room are used up"},
    {"fill_units", fill_units, METH_VARARGS,
     "fill_units(taken, leads, space, room, found): best fit by the free space of each one's lead"},
    {"deal_rounds", deal_rounds, METH_VARARGS,
     "deal_rounds(costs, loads, head_rounds, head_weight, found): equally many to each bucket"},
    {"deal_lightest", deal_lightest, METH_VARARGS,
     "deal_lightest(costs, sizes, caps, count_max, bucket_of, loads) -> True where all find room"},
    {"deal_differences", deal_differences, METH_VARARGS,
     "deal_differences(costs, buckets, found): Karmarkar-Karp, equally many to each bucket"},
    {"exchange", exchange, METH_VARARGS,
     "exchange(costs, sizes, caps, bucket_of, loads, count_max, pinned, may_move, target, "
     "rounds_max, stuck_max, window): lower the heaviest bucket by swaps and moves"},
    {"makespans", makespans, METH_VARARGS,
     "makespans(costs, stages, found): when each pipeline ends, one forward, one backward"},
    {NULL, NULL, 0, NULL},
};

static int add_stamp(PyObject *module)
{
    return PyModule_AddStringConstant(module, "stamp", MSD_KERNEL_STAMP);
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, add_stamp}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "_kernel", .m_doc = "Inner loops of planning, see the twins.",
    .m_size = 0,           .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__kernel(void) { return PyModuleDef_Init(&definition); }
