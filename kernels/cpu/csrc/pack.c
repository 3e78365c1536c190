// Weights laid out as dense.c and linear.c read them: what pack.py does with torch's operators, to the bit.
#include "simd.h"

#define STRIP 64
#define MAX_GROUP 256

// Sixteen rows of sixteen words -> sixteen columns of them.
INLINE void transposed(const uint32_t *from, int64_t stride, uint32_t *to) {
#if defined(__AVX512F__)
    __m512i row[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) row[i] = _mm512_loadu_si512(from + i * stride);
#pragma GCC unroll 4
    for (int step = 1; step < LANES; step *= 2) {  // blocks of `step` by `step` change places
        u32x16 low, high;
#pragma GCC unroll 16
        for (int l = 0; l < LANES; l++) {
            low[l] = l & step ? LANES + l - step : l;
            high[l] = l & step ? LANES + l : l + step;
        }
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) {
            if (i & step) continue;
            __m512i a = row[i], b = row[i + step];
            row[i] = _mm512_permutex2var_epi32(a, (__m512i)low, b);
            row[i + step] = _mm512_permutex2var_epi32(a, (__m512i)high, b);
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) _mm512_storeu_si512(to + i * LANES, row[i]);
#else
    for (int i = 0; i < LANES; i++)
        for (int k = 0; k < LANES; k++) to[k * LANES + i] = from[i * stride + k];
#endif
}

// [rows][words] -> [blocks of 16 rows][words][16]; rows that the last block lacks are zeros.
void motley_lay_words(const uint32_t *from, uint32_t *to, int64_t rows, int64_t words) {
    for (int64_t row = 0; row < rows; row += LANES, from += LANES * words, to += LANES * words) {
        const int count = MIN(rows - row, LANES);
        int64_t k = 0;
        for (; count == LANES && k + LANES <= words; k += LANES) transposed(from + k, words, to + k * LANES);
        for (; k < words; k++)
            for (int i = 0; i < LANES; i++) to[k * LANES + i] = i < count ? from[i * words + k] : 0;
    }
}

// One group of a row, rounded to its largest magnitude over 127: its code words, every fourth a strip's. What rounding
// has changed, squared, is added to `changed`, and magnitudes to `size`.
INLINE void lay_group(const float *x, uint8_t *at, int64_t group, int row, f32x16 *changed, f32x16 *size) {
    f32x16 most = splat(0.0f);
    for (int64_t i = 0; i < group; i += LANES) {
        f32x16 v = load_f32(x + i), magnitude = (f32x16)((i32x16)v & 0x7fffffff);
        most = max16(most, magnitude);
        *size += magnitude;
    }
    const float scale = reduce_max(most) / 127;
    const f32x16 by = splat(scale > 0 ? scale : 1.0f);
    memcpy(at + row * 4, &scale, 4);
    at[STRIP * 4 + row] = 128;
    for (int64_t i = 0; i < group; i += LANES) {
        f32x16 v = load_f32(x + i);
        i32x16 nearest = round_i32(v / by);
        f32x16 error = __builtin_convertvector(nearest, f32x16) * by - v;
        *changed += error * error;
        u8x16 codes = __builtin_convertvector(nearest + 128, u8x16);
        for (int j = 0; j < LANES; j += 4) memcpy(at + STRIP * 5 + (i + j) * STRIP + row * 4, (uint8_t *)&codes + j, 4);
    }
}

// [rows][inputs] of fp32 or bf16 -> int8 strips as linear.c has them. Gives the sum over rows of what rounding has
// changed over a typical weight, both squared: see pack.py.
double motley_lay_int8(const void *from, uint8_t *strips, int64_t rows, int64_t inputs, int64_t group, int type) {
    const int64_t groups = inputs / group, width = STRIP * 5 + STRIP * group;
    double squares = 0;
    float x[MAX_GROUP];
    for (int64_t row = 0; row < rows; row++) {
        f32x16 changed = splat(0.0f), size = splat(0.0f);
        for (int64_t g = 0; g < groups; g++) {
            for (int64_t i = 0; i < group; i += LANES)
                store_f32(x + i, load(from, row * inputs + g * group + i, type));
            lay_group(x, strips + (row / STRIP * groups + g) * width, group, row % STRIP, &changed, &size);
        }
        const float typical = reduce_sum(size) / inputs * 1.2533f;
        if (typical > 0) squares += reduce_sum(changed) / inputs / (typical * typical);
    }
    const int64_t last = rows % STRIP;
    for (int64_t g = 0; last && g < groups; g++) {
        uint8_t *at = strips + (rows / STRIP * groups + g) * width;
        for (int64_t row = last; row < STRIP; row++) {
            memset(at + row * 4, 0, 4);
            at[STRIP * 4 + row] = 0;
            for (int64_t i = 0; i < group; i += 4) memset(at + STRIP * 5 + i * STRIP + row * 4, 0, 4);
        }
    }
    return squares;
}
