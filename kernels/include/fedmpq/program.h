// Many calls in one: the functions of training.h that return a status, one after the other, as a step of training has them.
//
// kernels/prototypes.py and kernels/src/train/functions.inc are generated from the headers (`python -m tools.c_interface`).
#ifndef FEDMPQ_PROGRAM_H
#define FEDMPQ_PROGRAM_H

#include "training.h"

#ifdef __cplusplus
extern "C" {
#endif

// The number by which fedmpq_run knows a function of training.h that returns a status, or -1 if there is none of the name.
FEDMPQ_API int32_t fedmpq_function(const char* name);

// Calls `count` functions in their order. `functions` has the number of each, `addresses`, call after call, where the value of
// each argument lies; of an argument that is a pointer that is where the pointer lies. `arguments` is how many addresses there
// are. Values are read when their call's turn comes. Returns 0, or the first result below 0, behind which nothing is called,
// and in *stopped which call gave it. If there are no such functions or not as many arguments as they take, nothing is called
// and *stopped is -1. If `seconds` is not null, the time that each call took, by the clock of this thread, is added to it.
FEDMPQ_API int32_t fedmpq_run(const int32_t* functions, int32_t count, const int64_t* addresses, int64_t arguments,
                              int32_t* stopped, double* seconds);

#ifdef __cplusplus
}
#endif

#endif
