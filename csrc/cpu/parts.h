// What the kernels are made of, each part alone: `python -m bench bounds` times them and adds them up.
#pragma once
#include "../view.h"
#include "isa.h"

// Each does its part `repeats` times in each of `threads` tasks, in memory of the task's own that stays in its caches.
RETRO_EVERY_ISA(
    // Products [m,k] by [k,n] of what kernels make of elements of a `type`, rows of a taken a slice at a time as the
    // attentions do; n in whole vectors; by_columns: a lies [k,m].
    void part_products(int type, int m, int n, int k, bool by_columns, int64_t repeats, int threads);
    // A softmax's pass over n scores: less a maximum, exp2, summed, stored.
    void part_softmax(int n, int64_t repeats, int threads);
    // Rows [rows,columns] of a type as floats, and those transposed.
    void part_packing(int type, int rows, int columns, int64_t repeats, int threads);
    // Every element of x [rows,columns] read once; each thread has a range of the rows.
    void part_reading(const View& x, int threads);
    // Tasks that do nothing.
    void part_handover(int64_t tasks, int threads);)
