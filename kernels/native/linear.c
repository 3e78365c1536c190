// y = x @ w.T for integer weights in groups: 4 or 8 bits a weight, one scale and zero point per group.
//
// Each group of a row of x is rounded to int8 by its own largest magnitude. Within a group the dot product is
// exact integer arithmetic; groups are added in fp32 from the first to the last. A row's result is therefore
// the same bits whatever the number of rows, their values, or the number of threads.
//
//   block     16 outputs, one per lane
//   codes     [blocks][K / 4][16][4] bytes, or with 4 bits [blocks][K / 8][16][4]: the low nibbles are the
//             first four inputs of eight, the high nibbles the last four
//   scales    float [blocks][groups][16];  zeros uint8 likewise
#include <stdlib.h>
#include "pool.h"
#include "simd.h"

#define MAX_ROWS 8
#define MAX_BLOCKS 4

typedef struct {
    const uint8_t *codes;
    const float *scales;
    const uint8_t *zeros;
    const float *bias;          // [N] or NULL
    const int32_t *permutation; // [K] or NULL: column k takes input feature permutation[k]
    int64_t outputs, inputs, group, bits;
} weights;

typedef struct {
    int8_t *values;  // [rows][K]
    float *scales;   // [rows][groups]
    int32_t *sums;   // [rows][groups]: of the values, to take the zero points off
} quantized;

// acc[lane] += sum over j of w[lane][j] * x[j], w unsigned and x signed bytes, exact.
INLINE i32x16 dot4(i32x16 acc, u8x64 w, int32_t x, int bits) {
#if defined(__AVX512VNNI__)
    (void)bits;
    return (i32x16)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, _mm512_set1_epi32(x));
#elif defined(__AVX2__)
    // maddubs saturates at 16 bits: nibbles cannot reach it, so bytes are taken as two nibbles
    union { u8x64 v; __m256i h[2]; } all = {w};
    union { i32x16 v; __m256i h[2]; } sum = {acc};
    const __m256i four = _mm256_set1_epi32(x), ones = _mm256_set1_epi16(1), mask = _mm256_set1_epi8(15);
    for (int i = 0; i < 2; i++) {
        __m256i pairs = _mm256_maddubs_epi16(_mm256_and_si256(all.h[i], mask), four);
        sum.h[i] = _mm256_add_epi32(sum.h[i], _mm256_madd_epi16(pairs, ones));
        if (bits == 4) continue;
        __m256i upper = _mm256_and_si256(_mm256_srli_epi16(all.h[i], 4), mask);
        pairs = _mm256_madd_epi16(_mm256_maddubs_epi16(upper, four), ones);
        sum.h[i] = _mm256_add_epi32(sum.h[i], _mm256_slli_epi32(pairs, 4));
    }
    return sum.v;
#else
    (void)bits;
    int8_t four[4]; memcpy(four, &x, 4);
    for (int lane = 0; lane < 16; lane++)
        for (int j = 0; j < 4; j++) acc[lane] += (int32_t)w[4 * lane + j] * four[j];
    return acc;
#endif
}

INLINE int32_t four_bytes(const int8_t *p) { int32_t v; memcpy(&v, p, 4); return v; }

// `rows` rows from `row` on, times `blocks` blocks from `block` on; both are constants once inlined.
INLINE void tile(const weights *w, const quantized *x, void *y, enum dtype type, int64_t row, int64_t block,
                 const int rows, const int blocks, const int bits) {
    const int64_t inputs = w->inputs, group = w->group, groups = inputs / group, block_bytes = inputs * 2 * bits;
    const int step = bits == 4 ? 8 : 4;  // inputs in one 64-byte load
    f32x16 out[MAX_ROWS][MAX_BLOCKS];
#pragma GCC unroll 16
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 16
        for (int j = 0; j < blocks; j++) out[i][j] = splat(0.0f);
    const uint8_t *codes = w->codes + block * block_bytes;
    const int8_t *values = x->values + row * inputs;

    for (int64_t g = 0; g < groups; g++) {
        i32x16 acc[MAX_ROWS][MAX_BLOCKS];
#pragma GCC unroll 16
        for (int j = 0; j < blocks; j++) {
            u8x16 zeros; memcpy(&zeros, w->zeros + ((block + j) * groups + g) * LANES, 16);
            i32x16 minus = -__builtin_convertvector(zeros, i32x16);
#pragma GCC unroll 16
            for (int i = 0; i < rows; i++) acc[i][j] = minus * x->sums[(row + i) * groups + g];
        }
        for (int64_t k = 0; k < group; k += step) {
            u8x64 low[MAX_BLOCKS], high[MAX_BLOCKS];
#pragma GCC unroll 16
            for (int j = 0; j < blocks; j++) {
                u8x64 both; memcpy(&both, codes + j * block_bytes, 64);
                low[j] = bits == 4 ? both & 15 : both;
                high[j] = both >> 4;
            }
#pragma GCC unroll 16
            for (int i = 0; i < rows; i++) {
                const int8_t *at = values + i * inputs;
#pragma GCC unroll 16
                for (int j = 0; j < blocks; j++) acc[i][j] = dot4(acc[i][j], low[j], four_bytes(at), bits);
                if (bits == 8) continue;
#pragma GCC unroll 16
                for (int j = 0; j < blocks; j++) acc[i][j] = dot4(acc[i][j], high[j], four_bytes(at + 4), bits);
            }
            codes += 64, values += step;
        }
#pragma GCC unroll 16
        for (int j = 0; j < blocks; j++) {
            f32x16 scale = load_f32(w->scales + ((block + j) * groups + g) * LANES);
#pragma GCC unroll 16
            for (int i = 0; i < rows; i++)
                out[i][j] = fma16(__builtin_convertvector(acc[i][j], f32x16),
                                  scale * x->scales[(row + i) * groups + g], out[i][j]);
        }
    }
#pragma GCC unroll 16
    for (int j = 0; j < blocks; j++) {
        int64_t first = (block + j) * LANES;
        int count = MIN(w->outputs - first, LANES);
        f32x16 bias = w->bias ? load_tail(w->bias, first, F32, count) : splat(0.0f);
#pragma GCC unroll 16
        for (int i = 0; i < rows; i++)
            if (count == LANES) store(y, (row + i) * w->outputs + first, type, out[i][j] + bias);
            else store_tail(y, (row + i) * w->outputs + first, type, out[i][j] + bias, count);
    }
}

INLINE void rows_by_blocks(const weights *w, const quantized *x, void *y, enum dtype type, int64_t row,
                           int64_t end, int64_t block, const int blocks, const int bits) {
    for (; row + 8 <= end; row += 8) tile(w, x, y, type, row, block, 8, blocks, bits);
    for (; row + 4 <= end; row += 4) tile(w, x, y, type, row, block, 4, blocks, bits);
    for (; row + 2 <= end; row += 2) tile(w, x, y, type, row, block, 2, blocks, bits);
    for (; row < end; row++) tile(w, x, y, type, row, block, 1, blocks, bits);
}

// A few blocks for every row of a panel: few rows want many streams of weights, many rows many registers.
INLINE void panel(const weights *w, const quantized *x, void *y, enum dtype type, int64_t row, int64_t end,
                  int64_t block, int64_t last, const int bits) {
    if (end - row < 8)
        for (; block + 4 <= last; block += 4) rows_by_blocks(w, x, y, type, row, end, block, 4, bits);
    for (; block + 2 <= last; block += 2) rows_by_blocks(w, x, y, type, row, end, block, 2, bits);
    for (; block < last; block++) rows_by_blocks(w, x, y, type, row, end, block, 1, bits);
}

static void quantize_row(const void *x, enum dtype type, const weights *w, int64_t row, quantized *q) {
    const int64_t groups = w->inputs / w->group;
    float gathered[w->group];
    for (int64_t g = 0; g < groups; g++) {
        const void *from = x;
        enum dtype from_type = type;
        int64_t first = row * w->inputs + g * w->group;
        if (w->permutation) {
            for (int64_t k = 0; k < w->group; k++)
                gathered[k] = load_tail(x, row * w->inputs + w->permutation[g * w->group + k], type, 1)[0];
            from = gathered, from_type = F32, first = 0;
        }
        f32x16 top = splat(0.0f), poison = splat(0.0f);  // poison: NaN if anything is not finite
        for (int64_t k = 0; k < w->group; k += LANES) {
            f32x16 v = load(from, first + k, from_type);
            top = max16(top, pick(v < 0.0f, -v, v));
            poison += v * 0.0f;
        }
        float most = reduce_max(top), inverse = most > 0.0f ? 127.0f / most : 0.0f;
        i32x16 sum = splat_i32(0);
        for (int64_t k = 0; k < w->group; k += LANES) {
            i32x16 rounded = round_i32(load(from, first + k, from_type) * inverse);
            i8x16 bytes = __builtin_convertvector(rounded, i8x16);
            memcpy(q->values + row * w->inputs + g * w->group + k, &bytes, 16);
            sum += __builtin_convertvector(bytes, i32x16);
        }
        int32_t total = 0;
        for (int lane = 0; lane < LANES; lane++) total += sum[lane];
        q->scales[row * groups + g] = most * (1.0f / 127.0f) + reduce_sum(poison);
        q->sums[row * groups + g] = total;
    }
}

typedef struct {
    const weights *w;
    const void *x;
    void *y;
    quantized q;
    int64_t rows, blocks, unit_blocks, panel_units;
    enum dtype type;
} job;

static void quantize_unit(const void *context, int64_t unit) {
    const job *j = context;
    for (int64_t row = unit * 8; row < MIN(unit * 8 + 8, j->rows); row++)
        quantize_row(j->x, j->type, j->w, row, &j->q);
}

#define PANEL_ROWS 128  // rows of x that stay in the L2 cache while the weights go by

static void multiply_unit(const void *context, int64_t unit) {
    const job *j = context;
    const int64_t row = unit / j->panel_units * PANEL_ROWS, end = MIN(row + PANEL_ROWS, j->rows);
    const int64_t block = unit % j->panel_units * j->unit_blocks, last = MIN(block + j->unit_blocks, j->blocks);
    if (j->w->bits == 4) panel(j->w, &j->q, j->y, j->type, row, end, block, last, 4);
    else panel(j->w, &j->q, j->y, j->type, row, end, block, last, 8);
}

// x [rows][K] -> y [rows][N], both of `type`. Returns 0, or 1 where memory for the rounded x is refused.
int motley_linear(const weights *w, const void *x, void *y, int64_t rows, int type, int threads) {
    const int64_t groups = w->inputs / w->group, blocks = (w->outputs + LANES - 1) / LANES;
    int8_t *memory = malloc(rows * (w->inputs + groups * 8));
    if (!memory) return 1;
    quantized q = {memory + rows * groups * 8, (float *)memory, (int32_t *)memory + rows * groups};
    const int64_t share = blocks / (threads * 8) / 4 * 4, unit_blocks = MIN(share > 4 ? share : 4, 64);
    const int64_t panel_units = (blocks + unit_blocks - 1) / unit_blocks;
    job j = {w, x, y, q, rows, blocks, unit_blocks, panel_units, type};
    parallel((rows + 7) / 8, threads, quantize_unit, &j);
    parallel((rows + PANEL_ROWS - 1) / PANEL_ROWS * panel_units, threads, multiply_unit, &j);
    free(memory);
    return 0;
}
