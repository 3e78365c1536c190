// y = x @ w.T for fp32 or bf16 weights, summed in fp32 from the first input to the last: a row's result is the
// same bits whatever the number of rows, which no BLAS promises.
//
//   weights   [blocks of 16 outputs][K][16]
#include "pool.h"
#include "simd.h"

#define MAX_ROWS 8
#define MAX_BLOCKS 2

typedef struct {
    const void *weights;
    const float *bias;  // [N] or NULL
    int64_t outputs, inputs, type, y_type;
} dense_weights;

INLINE float number(const void *p, int64_t i, enum dtype type) {
    if (type == F32) return ((const float *)p)[i];
    uint32_t bits = (uint32_t)((const uint16_t *)p)[i] << 16;
    float x; memcpy(&x, &bits, 4);
    return x;
}

INLINE void tile(const dense_weights *w, const void *x, void *y, int64_t row, int64_t block, enum dtype type,
                 const int rows, const int blocks) {
    const int64_t inputs = w->inputs;
    f32x16 sum[MAX_ROWS][MAX_BLOCKS];
#pragma GCC unroll 16
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 16
        for (int j = 0; j < blocks; j++) sum[i][j] = splat(0.0f);
    for (int64_t k = 0; k < inputs; k++) {
        f32x16 v[MAX_BLOCKS];
#pragma GCC unroll 16
        for (int j = 0; j < blocks; j++) v[j] = load(w->weights, ((block + j) * inputs + k) * LANES, type);
#pragma GCC unroll 16
        for (int i = 0; i < rows; i++) {
            f32x16 one = splat(number(x, (row + i) * inputs + k, type));
#pragma GCC unroll 16
            for (int j = 0; j < blocks; j++) sum[i][j] = fma16(one, v[j], sum[i][j]);
        }
    }
#pragma GCC unroll 16
    for (int j = 0; j < blocks; j++) {
        int64_t first = (block + j) * LANES;
        int count = MIN(w->outputs - first, LANES);
        f32x16 bias = w->bias ? load_tail(w->bias, first, F32, count) : splat(0.0f);
#pragma GCC unroll 16
        for (int i = 0; i < rows; i++)
            store_tail(y, (row + i) * w->outputs + first, w->y_type, sum[i][j] + bias, count);
    }
}

INLINE void panel(const dense_weights *w, const void *x, void *y, int64_t row, int64_t end, int64_t block,
                  enum dtype type, const int blocks) {
    for (; row + 8 <= end; row += 8) tile(w, x, y, row, block, type, 8, blocks);
    for (; row + 4 <= end; row += 4) tile(w, x, y, row, block, type, 4, blocks);
    for (; row < end; row++) tile(w, x, y, row, block, type, 1, blocks);
}

typedef struct {
    const dense_weights *w;
    const void *x;
    void *y;
    int64_t rows, blocks, pairs;
} job;

#define PANEL_ROWS 64
#define UNIT_PAIRS 2

static void unit_of_job(const void *context, int64_t unit) {
    const job *j = context;
    const int64_t units = (j->pairs + UNIT_PAIRS - 1) / UNIT_PAIRS;
    const int64_t row = unit / units * PANEL_ROWS, end = MIN(row + PANEL_ROWS, j->rows);
    for (int64_t pair = unit % units * UNIT_PAIRS; pair < MIN((unit % units + 1) * UNIT_PAIRS, j->pairs); pair++) {
        const int64_t block = pair * 2;
        if (block + 2 > j->blocks) {
            if (j->w->type == F32) panel(j->w, j->x, j->y, row, end, block, F32, 1);
            else panel(j->w, j->x, j->y, row, end, block, BF16, 1);
        } else if (j->w->type == F32) panel(j->w, j->x, j->y, row, end, block, F32, 2);
        else panel(j->w, j->x, j->y, row, end, block, BF16, 2);
    }
}

// x [rows][K], of the weights' type -> y [rows][N], of y_type.
void motley_dense(const dense_weights *w, const void *x, void *y, int64_t rows, int threads) {
    const int64_t blocks = (w->outputs + LANES - 1) / LANES, pairs = (blocks + 1) / 2;
    job j = {w, x, y, rows, blocks, pairs};
    parallel((rows + PANEL_ROWS - 1) / PANEL_ROWS * ((pairs + UNIT_PAIRS - 1) / UNIT_PAIRS), threads, unit_of_job, &j);
}
