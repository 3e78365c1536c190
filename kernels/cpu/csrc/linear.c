// y = x @ w.T for integer weights in groups: 4 or 8 bits a weight, one scale and zero point per group.
//
// Each group of a row of x is rounded to int8 by its own largest magnitude. Within a group the dot product is
// exact integer arithmetic; groups are added in fp32 from the first to the last. A row's result is therefore
// the same bits whatever the number of rows, their values, or the number of threads.
//
// Weights come in strips of 64 outputs, four vectors of 16. A strip is one stream, group after group:
//
//   64 scales fp32 · 64 zero points uint8 · codes [K / 4][64][4] bytes, or with 4 bits [K / 8][64][4]: the low
//   nibbles are the first four inputs of eight, the high nibbles the last four
#include <stdlib.h>
#include "pool.h"
#include "simd.h"

#define STRIP 64
#define MAX_ROWS 8
#define VECTORS 4  // of a strip

typedef struct {
    const uint8_t *strips;
    const float *bias;          // [N] or NULL
    const int32_t *permutation; // [K] or NULL: column k takes input feature permutation[k]
    int64_t outputs, inputs, group, bits;
} weights;

typedef struct {
    int8_t *values;  // [rows][K]
    float *scales;   // [rows][groups]
    int32_t *sums;   // [rows][groups]: of the values, to take the zero points off
} quantized;

INLINE int32_t four_bytes(const int8_t *p) { int32_t v; memcpy(&v, p, 4); return v; }

#if defined(__AVX2__) && !defined(__AVX512VNNI__)

// maddubs adds two products in 16 bits: those of nibbles fit, eight times over (8 * 2 * 15 * 127 = 30,480). So bytes
// are taken as two nibbles, and what 32 inputs give is widened at once.
#define NARROW 32
#define HALVES (2 * VECTORS)  // registers of a strip, eight outputs each
#define SUMS 8                // that leave registers for the rest
#define ROWS_OF(bits) ((bits) == 4 ? SUMS : SUMS / 2)

// `halves` times eight outputs of one group for `rows` rows: exact integers are added to the totals.
INLINE void total_group(__m256i total[][MAX_ROWS], const uint8_t *codes, const int8_t *values, int64_t inputs,
                        int64_t group, const int rows, const int halves, const int bits) {
    const int step = bits == 4 ? 8 : 4, planes = bits == 4 ? 1 : 2;
    const __m256i mask = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1), sixteens = _mm256_set1_epi16(16);
    for (int64_t begin = 0; begin < group; begin += NARROW) {
        __m256i sum[HALVES][MAX_ROWS][2];
#pragma GCC unroll 16
        for (int h = 0; h < halves; h++)
#pragma GCC unroll 16
            for (int i = 0; i < rows; i++) sum[h][i][0] = sum[h][i][1] = _mm256_setzero_si256();
        const int64_t end = MIN(begin + NARROW, group);
        for (int64_t k = begin; k < end; k += step, codes += STRIP * 4) {
#pragma GCC unroll 16
            for (int h = 0; h < halves; h++) {
                __m256i both = _mm256_loadu_si256((const __m256i *)(codes + h * 32));
                __m256i low = _mm256_and_si256(both, mask), high = _mm256_and_si256(_mm256_srli_epi16(both, 4), mask);
#pragma GCC unroll 16
                for (int i = 0; i < rows; i++) {
                    const int8_t *four = values + i * inputs + k;
                    __m256i first = _mm256_set1_epi32(four_bytes(four)), *sums = sum[h][i];
                    __m256i second = bits == 4 ? _mm256_set1_epi32(four_bytes(four + 4)) : first;
                    sums[0] = _mm256_add_epi16(sums[0], _mm256_maddubs_epi16(low, first));
                    sums[planes - 1] = _mm256_add_epi16(sums[planes - 1], _mm256_maddubs_epi16(high, second));
                }
            }
        }
#pragma GCC unroll 16
        for (int h = 0; h < halves; h++)
#pragma GCC unroll 16
            for (int i = 0; i < rows; i++) {
                total[h][i] = _mm256_add_epi32(total[h][i], _mm256_madd_epi16(sum[h][i][0], ones));
                if (planes == 1) continue;
                total[h][i] = _mm256_add_epi32(total[h][i], _mm256_madd_epi16(sum[h][i][1], sixteens));
            }
    }
}

// One group of a strip for `rows` rows. As many outputs at once as leave registers: codes that lie one after the other
// come from memory sooner than those of every fourth line.
INLINE void add_group(f32x16 out[][VECTORS], const uint8_t *at, const quantized *x, int64_t row, int64_t g,
                      const weights *w, const int rows, const int bits) {
    const int64_t inputs = w->inputs, group = w->group, groups = inputs / group;
    const int8_t *values = x->values + row * inputs + g * group;
    const int at_once = MIN(ROWS_OF(bits), rows), halves = ROWS_OF(bits) / at_once;
    __m256i total[HALVES][MAX_ROWS];
    for (int h = 0; h < HALVES; h++) {
        __m256i zeros = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(at + STRIP * 4 + h * 8)));
#pragma GCC unroll 16
        for (int i = 0; i < rows; i++)
            total[h][i] = _mm256_mullo_epi32(zeros, _mm256_set1_epi32(-x->sums[(row + i) * groups + g]));
    }
#pragma GCC unroll 2
    for (int i = 0; i < rows; i += at_once)
        for (int h = 0; h < HALVES; h += halves) {
            __m256i (*rest)[MAX_ROWS] = (__m256i (*)[MAX_ROWS])&total[h][i];
            total_group(rest, at + STRIP * 5 + h * 32, values + i * inputs, inputs, group, at_once, halves, bits);
        }
    for (int j = 0; j < VECTORS; j++) {
        f32x16 scale = load_f32((const float *)at + j * LANES);
#pragma GCC unroll 16
        for (int i = 0; i < rows; i++) {
            union { i32x16 v; __m256i h[2]; } whole = {.h = {total[2 * j][i], total[2 * j + 1][i]}};
            out[i][j] = fma16(__builtin_convertvector(whole.v, f32x16), scale * x->scales[(row + i) * groups + g],
                              out[i][j]);
        }
    }
}

#else

// acc[lane] += sum over j of w[lane][j] * x[j], w unsigned and x signed bytes, exact.
INLINE i32x16 dot4(i32x16 acc, u8x64 w, int32_t x) {
#if defined(__AVX512VNNI__)
    return (i32x16)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, _mm512_set1_epi32(x));
#else
    int8_t four[4]; memcpy(four, &x, 4);
    for (int lane = 0; lane < 16; lane++)
        for (int j = 0; j < 4; j++) acc[lane] += (int32_t)w[4 * lane + j] * four[j];
    return acc;
#endif
}

// `width` vectors from `first` on.
INLINE void add_vectors(f32x16 out[][VECTORS], const uint8_t *at, const quantized *x, int64_t row, int64_t g,
                        const weights *w, const int first, const int rows, const int width, const int bits) {
    const int64_t inputs = w->inputs, group = w->group, groups = inputs / group;
    const int step = bits == 4 ? 8 : 4;  // inputs in 64 bytes of one vector
    const int8_t *values = x->values + row * inputs + g * group;
    i32x16 acc[MAX_ROWS][VECTORS];
#pragma GCC unroll 16
    for (int j = 0; j < width; j++) {
        u8x16 zeros; memcpy(&zeros, at + STRIP * 4 + (first + j) * LANES, 16);
        i32x16 minus = -__builtin_convertvector(zeros, i32x16);
#pragma GCC unroll 16
        for (int i = 0; i < rows; i++) acc[i][j] = minus * x->sums[(row + i) * groups + g];
    }
    const uint8_t *codes = at + STRIP * 5 + first * 64;
    for (int64_t k = 0; k < group; k += step, codes += STRIP * 4) {
        u8x64 low[VECTORS], high[VECTORS];
#pragma GCC unroll 16
        for (int j = 0; j < width; j++) {
            u8x64 both; memcpy(&both, codes + j * 64, 64);
            low[j] = bits == 4 ? both & 15 : both;
            high[j] = both >> 4;
        }
#pragma GCC unroll 16
        for (int i = 0; i < rows; i++) {
            const int8_t *four = values + i * inputs + k;
#pragma GCC unroll 16
            for (int j = 0; j < width; j++) acc[i][j] = dot4(acc[i][j], low[j], four_bytes(four));
            if (bits == 8) continue;
#pragma GCC unroll 16
            for (int j = 0; j < width; j++) acc[i][j] = dot4(acc[i][j], high[j], four_bytes(four + 4));
        }
    }
#pragma GCC unroll 16
    for (int j = 0; j < width; j++) {
        f32x16 scale = load_f32((const float *)at + (first + j) * LANES);
#pragma GCC unroll 16
        for (int i = 0; i < rows; i++)
            out[i][first + j] = fma16(__builtin_convertvector(acc[i][j], f32x16),
                                      scale * x->scales[(row + i) * groups + g], out[i][first + j]);
    }
}

// One group of a strip for `rows` rows. Few rows leave registers for all its vectors at once, many for two.
INLINE void add_group(f32x16 out[][VECTORS], const uint8_t *at, const quantized *x, int64_t row, int64_t g,
                      const weights *w, const int rows, const int bits) {
    if (rows <= 4) add_vectors(out, at, x, row, g, w, 0, rows, 4, bits);
    else {
        add_vectors(out, at, x, row, g, w, 0, rows, 2, bits);
        add_vectors(out, at, x, row, g, w, 2, rows, 2, bits);
    }
}

#endif

// A strip for `rows` rows from `row` on.
INLINE void tile(const weights *w, const quantized *x, void *y, enum dtype type, int64_t row, int64_t strip,
                 const int rows, const int bits) {
    const int64_t groups = w->inputs / w->group, bytes = STRIP * 5 + w->group * STRIP * bits / 8;
    const uint8_t *at = w->strips + strip * groups * bytes;
    f32x16 out[MAX_ROWS][VECTORS];
#pragma GCC unroll 16
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 16
        for (int j = 0; j < VECTORS; j++) out[i][j] = splat(0.0f);
    for (int64_t g = 0; g < groups; g++, at += bytes) add_group(out, at, x, row, g, w, rows, bits);
#pragma GCC unroll 16
    for (int j = 0; j < VECTORS; j++) {
        int64_t output = strip * STRIP + j * LANES;
        int count = MIN(w->outputs - output, LANES);
        if (count <= 0) break;
        f32x16 bias = w->bias ? load_tail(w->bias, output, F32, count) : splat(0.0f);
#pragma GCC unroll 16
        for (int i = 0; i < rows; i++)
            if (count == LANES) store(y, (row + i) * w->outputs + output, type, out[i][j] + bias);
            else store_tail(y, (row + i) * w->outputs + output, type, out[i][j] + bias, count);
    }
}

INLINE void strip_of_panel(const weights *w, const quantized *x, void *y, enum dtype type, int64_t row, int64_t end,
                           int64_t strip, const int bits) {
    for (; row + 8 <= end; row += 8) tile(w, x, y, type, row, strip, 8, bits);
    for (; row + 4 <= end; row += 4) tile(w, x, y, type, row, strip, 4, bits);
    for (; row + 2 <= end; row += 2) tile(w, x, y, type, row, strip, 2, bits);
    for (; row < end; row++) tile(w, x, y, type, row, strip, 1, bits);
}

static void quantize_row(const void *x, enum dtype type, const weights *w, int64_t row, const quantized *q) {
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
        parts top = {splat(0.0f)}, poison = {splat(0.0f)};  // poison: NaN if anything is not finite
        for (int64_t k = 0; k < w->group; k += LANES)
#pragma GCC unroll 4
            for (int p = 0; p < PARTS; p++) {
                f32v v = load_part(from, first + k + p * REGISTER, from_type);
                top.part[p] = max_part(top.part[p], (f32v)((i32v)v & 0x7fffffff));
                poison.part[p] += v * 0.0f;
            }
        float most = reduce_max(top.v), inverse = most > 0.0f ? 127.0f / most : 0.0f;
        u32v sum = {0};  // of garbage where that is poison: it may wrap
        for (int64_t k = 0; k < w->group; k += LANES) {
            i32v rounded[PARTS];
#pragma GCC unroll 4
            for (int p = 0; p < PARTS; p++) {
                rounded[p] = round_part(load_part(from, first + k + p * REGISTER, from_type) * inverse);
                sum += (u32v)rounded[p];
            }
            u8x16 bytes = low_bytes(rounded);
            memcpy(q->values + row * w->inputs + g * w->group + k, &bytes, 16);
        }
        uint32_t total = 0;
        for (int lane = 0; lane < REGISTER; lane++) total += sum[lane];
        q->scales[row * groups + g] = most * (1.0f / 127.0f) + reduce_sum(poison.v);
        q->sums[row * groups + g] = total;
    }
}

typedef struct {
    const weights *w;
    const void *x;
    void *y;
    quantized q;
    int64_t rows, strips, unit_strips, panel_units;
    enum dtype x_type, y_type;
} job;

static void quantize_unit(const void *context, int64_t unit) {
    const job *j = context;
    for (int64_t row = unit * 8; row < MIN(unit * 8 + 8, j->rows); row++)
        quantize_row(j->x, j->x_type, j->w, row, &j->q);
}

#define PANEL_ROWS 128  // rows of x that stay in the L2 cache while the weights go by

static void multiply_unit(const void *context, int64_t unit) {
    const job *j = context;
    const int64_t row = unit / j->panel_units * PANEL_ROWS, end = MIN(row + PANEL_ROWS, j->rows);
    const int64_t first = unit % j->panel_units * j->unit_strips, last = MIN(first + j->unit_strips, j->strips);
    for (int64_t strip = first; strip < last; strip++)
        if (j->w->bits == 4) strip_of_panel(j->w, &j->q, j->y, j->y_type, row, end, strip, 4);
        else strip_of_panel(j->w, &j->q, j->y, j->y_type, row, end, strip, 8);
}

// x [rows][K] -> y [rows][N]. Returns 0, or 1 where memory for the rounded x is refused.
int motley_linear(const weights *w, const void *x, void *y, int64_t rows, int x_type, int y_type,
                  int threads) {
    const int64_t groups = w->inputs / w->group, strips = (w->outputs + STRIP - 1) / STRIP;
    int8_t *memory = malloc(rows * (w->inputs + groups * 8));
    if (!memory) return 1;
    quantized q = {memory + rows * groups * 8, (float *)memory, (int32_t *)memory + rows * groups};
    const int64_t share = strips / (threads * 8), unit_strips = MIN(share > 1 ? share : 1, 16);
    const int64_t panel_units = (strips + unit_strips - 1) / unit_strips;
    job j = {w, x, y, q, rows, strips, unit_strips, panel_units, x_type, y_type};
    parallel((rows + 7) / 8, threads, quantize_unit, &j);
    parallel((rows + PANEL_ROWS - 1) / PANEL_ROWS * panel_units, threads, multiply_unit, &j);
    free(memory);
    return 0;
}
