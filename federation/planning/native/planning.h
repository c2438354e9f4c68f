/* Inner loops of planning: best fit of fragments into rows, deals of rows and items to buckets.
 *
 * The Python twins (fill_twin.py, deal_twin.py, pipeline_twin.py) give the same results; what is
 * decided and why is said there and in best_fit.py, balance.py, capped_deal.py. All arithmetic is on
 * int64 with stated ties. Callers keep sums within 62 bits.
 * Limited API (3.11), buffer protocol only: one binary for every later Python, no numpy headers.
 */
#ifndef MSD_PLANNING_H
#define MSD_PLANNING_H

#include "buffers.h"

PyObject *fill_tokens(PyObject *module, PyObject *args);
PyObject *fill_units(PyObject *module, PyObject *args);
PyObject *deal_rounds(PyObject *module, PyObject *args);
PyObject *exchange(PyObject *module, PyObject *args);
PyObject *deal_lightest(PyObject *module, PyObject *args);
PyObject *deal_differences(PyObject *module, PyObject *args);
PyObject *makespans(PyObject *module, PyObject *args);

#endif
