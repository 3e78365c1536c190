#pragma once
#include <stdint.h>

// Calls work(context, unit) for every unit from 0 to units - 1, on at most `threads` threads, this one included.
void parallel(int64_t units, int threads, void (*work)(const void *context, int64_t unit), const void *context);
