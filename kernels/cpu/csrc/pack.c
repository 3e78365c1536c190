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

// Rows that the last strip lacks, of groups of so many code words each: zeros.
static void lay_nothing(uint8_t *strips, int64_t rows, int64_t groups, int64_t words) {
    const int64_t last = rows % STRIP, width = STRIP * 5 + STRIP * 4 * words;
    for (int64_t g = 0; last && g < groups; g++) {
        uint8_t *at = strips + (rows / STRIP * groups + g) * width;
        memset(at + last * 4, 0, (STRIP - last) * 4);
        memset(at + STRIP * 4 + last, 0, STRIP - last);
        for (int64_t k = 0; k < words; k++) memset(at + STRIP * 5 + (k * STRIP + last) * 4, 0, (STRIP - last) * 4);
    }
}

// Codes [rows][inputs] a byte each, with scales and zero points [rows][groups] -> strips as linear.c has them.
void motley_lay_grouped(const uint8_t *codes, const float *scales, const uint8_t *zeros, uint8_t *strips, int64_t rows,
                        int64_t inputs, int64_t group, int bits) {
    const int64_t groups = inputs / group, words = group * bits / 32;
    for (int64_t first = 0; first < rows; first += LANES)  // sixteen rows fill lines of the cache
        for (int64_t g = 0; g < groups; g++) {
            uint8_t *at = strips + (first / STRIP * groups + g) * (STRIP * 5 + STRIP * 4 * words);
            const uint8_t *from = codes + first * inputs + g * group;
            const int count = MIN(rows - first, LANES), place = first % STRIP;
            for (int i = 0; i < count; i++) {
                memcpy(at + (place + i) * 4, scales + (first + i) * groups + g, 4);
                at[STRIP * 4 + place + i] = zeros[(first + i) * groups + g];
            }
            uint8_t *to = at + STRIP * 5 + place * 4;
            for (int64_t k = 0; k < words; k++, to += STRIP * 4)
                for (int i = 0; i < count; i++) {
                    const uint8_t *each = from + i * inputs + k * (32 / bits);
                    uint32_t word, high;
                    memcpy(&word, each, 4);
                    if (bits == 4) memcpy(&high, each + 4, 4), word |= high << 4;
                    memcpy(to + i * 4, &word, 4);
                }
        }
    lay_nothing(strips, rows, groups, words);
}

// What rounding has changed of a row, squared, and its magnitudes, summed by lanes.
typedef struct { f32v changed[PARTS], size[PARTS]; } difference;

// One group of a row, rounded to its largest magnitude over 127: the codes, and the scale they are to be taken by.
INLINE float round_group(const void *from, int64_t first, enum dtype type, int64_t group, uint8_t *codes,
                         difference *sum) {
    parts most = {splat(0.0f)};
    for (int64_t i = 0; i < group; i += LANES)
#pragma GCC unroll 4
        for (int k = 0; k < PARTS; k++) {
            f32v magnitude = (f32v)((i32v)load_part(from, first + i + k * REGISTER, type) & 0x7fffffff);
            most.part[k] = max_part(most.part[k], magnitude);
            sum->size[k] += magnitude;
        }
    const float scale = reduce_max(most.v) / 127;
    const f32v by = splat_part(scale > 0 ? scale : 1.0f);
    for (int64_t i = 0; i < group; i += LANES) {
        i32v whole[PARTS];
#pragma GCC unroll 4
        for (int k = 0; k < PARTS; k++) {
            f32v v = load_part(from, first + i + k * REGISTER, type);
            whole[k] = round_part(v / by) + 128;
            f32v error = __builtin_convertvector(whole[k] - 128, f32v) * by - v;
            sum->changed[k] += error * error;
        }
        u8x16 bytes = low_bytes(whole);
        memcpy(codes + i, &bytes, LANES);
    }
    return scale;
}

INLINE float sum_of(const f32v *part) {
    parts all;
    memcpy(&all, part, sizeof all);
    return reduce_sum(all.v);
}

// `count` rows, sixteen at most, from row `row` on: their groups, and of their code words every fourth a strip's.
INLINE double lay_rows(const void *from, uint8_t *strips, int64_t row, int count, int64_t inputs, int64_t group,
                       enum dtype type) {
    const int64_t groups = inputs / group, width = STRIP * 5 + STRIP * group;
    const int place = row % STRIP;
    uint8_t codes[LANES * MAX_GROUP];
    difference sums[LANES] = {0};
    for (int64_t g = 0; g < groups; g++) {
        uint8_t *at = strips + (row / STRIP * groups + g) * width;
        for (int i = 0; i < count; i++) {
            const int64_t first = (row + i) * inputs + g * group;
            float scale = round_group(from, first, type, group, codes + i * group, &sums[i]);
            memcpy(at + (place + i) * 4, &scale, 4);
            at[STRIP * 4 + place + i] = 128;
        }
        for (int64_t k = 0; k < group; k += 4)
            for (int i = 0; i < count; i++)
                memcpy(at + STRIP * 5 + k * STRIP + (place + i) * 4, codes + i * group + k, 4);
    }
    double squares = 0;
    for (int i = 0; i < count; i++) {
        const float typical = sum_of(sums[i].size) / inputs * 1.2533f;
        if (typical > 0) squares += sum_of(sums[i].changed) / inputs / (typical * typical);
    }
    return squares;
}

// [rows][inputs] of fp32 or bf16 -> int8 strips as linear.c has them. Gives the sum over rows of what rounding has
// changed over a typical weight, both squared: see pack.py.
double motley_lay_int8(const void *from, uint8_t *strips, int64_t rows, int64_t inputs, int64_t group, int type) {
    double squares = 0;
    for (int64_t row = 0; row < rows; row += LANES) {
        const int count = MIN(rows - row, LANES);
        if (type == F32) squares += lay_rows(from, strips, row, count, inputs, group, F32);
        else squares += lay_rows(from, strips, row, count, inputs, group, BF16);
    }
    lay_nothing(strips, rows, inputs / group, group / 4);
    return squares;
}
