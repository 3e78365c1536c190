// y = x @ w.T for fp32 or bf16 weights, summed in fp32 from the first input to the last: a row's result is the
// same bits whatever the number of rows, which no BLAS promises.
//
//   weights   fp32 [blocks of 16 outputs][K][16], bf16 [blocks][K / 2][16][2]; an odd K is filled up with zeros
#include "pool.h"
#include "simd.h"

#define MAX_ROWS 8
#define MAX_BLOCKS 2
// What leaves registers for its sums: there are 32 of 16 lanes, or 16 of 8.
#define MANY_ROWS (REGISTER == 16 ? 8 : 6)
#define MANY_BLOCKS (REGISTER == 16 ? 2 : 1)

typedef struct {
    const void *weights;
    const float *bias;  // [N] or NULL
    int64_t outputs, inputs, type, y_type;
} dense_weights;

// sum[lane] += w[lane] * x for fp32; for bf16 w and x are pairs and both products are added. `at`: in words.
INLINE f32v add_product(f32v sum, const void *w, int64_t at, uint32_t x, enum dtype type) {
    float first; uint32_t bits = type == F32 ? x : x << 16;
    memcpy(&first, &bits, 4);
    if (type == F32) return fma_part(splat_part(first), load_f32_part((const float *)w + at), sum);
#if defined(__AVX512BF16__)
    __m512i pairs = _mm512_loadu_si512((const uint32_t *)w + at);
    return (f32v)_mm512_dpbf16_ps((__m512)sum, (__m512bh)pairs, (__m512bh)_mm512_set1_epi32(x));
#else
    u32v pairs; memcpy(&pairs, (const uint32_t *)w + at, sizeof pairs);
    float second; bits = x & 0xffff0000u;
    memcpy(&second, &bits, 4);
    sum = fma_part(splat_part(first), (f32v)(pairs << 16), sum);
    return fma_part(splat_part(second), (f32v)(pairs & 0xffff0000u), sum);
#endif
}

INLINE void tile(const dense_weights *w, const void *x, void *y, int64_t row, int64_t block, enum dtype type,
                 const int rows, const int blocks) {
    const int64_t inputs = w->inputs, size = type == F32 ? 4 : 2, steps = type == F32 ? inputs : (inputs + 1) / 2;
    const int64_t whole = type == F32 ? inputs : inputs / 2;
    const char *from = (const char *)x + row * inputs * size;
    f32v sum[MAX_ROWS][MAX_BLOCKS * PARTS];
#pragma GCC unroll 16
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 16
        for (int j = 0; j < blocks * PARTS; j++) sum[i][j] = splat_part(0.0f);
    for (int64_t k = 0; k < steps; k++) {
#pragma GCC unroll 16
        for (int i = 0; i < rows; i++) {
            uint32_t bits;
            if (k < whole) memcpy(&bits, from + i * inputs * size + k * 4, 4);
            else {  // the last input of an odd number of bf16
                uint16_t last; memcpy(&last, from + ((i + 1) * inputs - 1) * size, 2);
                bits = last;
            }
#pragma GCC unroll 16
            for (int j = 0; j < blocks * PARTS; j++) {
                const int64_t at = ((block + j / PARTS) * steps + k) * LANES + j % PARTS * REGISTER;
                sum[i][j] = add_product(sum[i][j], w->weights, at, bits, type);
            }
        }
    }
#pragma GCC unroll 16
    for (int j = 0; j < blocks; j++) {
        int64_t first = (block + j) * LANES;
        int count = MIN(w->outputs - first, LANES);
        f32x16 bias = w->bias ? load_tail(w->bias, first, F32, count) : splat(0.0f);
#pragma GCC unroll 16
        for (int i = 0; i < rows; i++) {
            f32x16 total; memcpy(&total, &sum[i][j * PARTS], 64);
            store_tail(y, (row + i) * w->outputs + first, w->y_type, total + bias, count);
        }
    }
}

INLINE void tiles(const dense_weights *w, const void *x, void *y, int64_t row, int64_t block, enum dtype type,
                  const int rows, const int blocks) {
#pragma GCC unroll 2
    for (int j = 0; j < blocks; j += MANY_BLOCKS)
        tile(w, x, y, row, block + j, type, rows, MIN(MANY_BLOCKS, blocks - j));
}

INLINE void panel(const dense_weights *w, const void *x, void *y, int64_t row, int64_t end, int64_t block,
                  enum dtype type, const int blocks) {
    for (; row + MANY_ROWS <= end; row += MANY_ROWS) tiles(w, x, y, row, block, type, MANY_ROWS, blocks);
    for (; row + 4 <= end; row += 4) tiles(w, x, y, row, block, type, 4, blocks);
    for (; row + 2 <= end; row += 2) tile(w, x, y, row, block, type, 2, blocks);
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

// What rounds differently from machine to machine: the same words promise the same bits. Integer products do not.
const char *motley_arithmetic(void) {
#if defined(__AVX512BF16__)
    return "fma-bf16dot";
#elif defined(__FMA__)
    return "fma";
#else
    return "plain";
#endif
}
