// Sixteen lanes, whatever the machine has: GCC and clang split or fuse them. Every helper works lane by lane
// in a fixed order, so that a row's result never depends on its neighbours.
//
// What is wider than a register is kept in memory by GCC, though, and sums that are added to in a loop must not be:
// those are of type f32v, one register, of which PARTS are the sixteen lanes.
#pragma once
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define LANES 16
#if defined(__AVX512F__)
#define REGISTER 16  // lanes of one
#elif defined(__AVX2__) && defined(__FMA__)
#define REGISTER 8
#else
#define REGISTER 4
#endif
#define PARTS (LANES / REGISTER)
#define INLINE static inline __attribute__((always_inline))
#define MIN(a, b) ((a) < (b) ? (a) : (b))

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef uint8_t u8x16 __attribute__((vector_size(16)));
typedef uint8_t u8x64 __attribute__((vector_size(64)));

typedef float f32v __attribute__((vector_size(REGISTER * 4)));
typedef int32_t i32v __attribute__((vector_size(REGISTER * 4)));
typedef uint32_t u32v __attribute__((vector_size(REGISTER * 4)));
typedef uint16_t u16v __attribute__((vector_size(REGISTER * 2)));
typedef int8_t i8v __attribute__((vector_size(REGISTER)));

enum dtype { F32 = 0, BF16 = 1, I8 = 2 };  // I8: codes of a KV cache, read alone

INLINE f32x16 splat(float x) { return x - (f32x16){0}; }
INLINE i32x16 splat_i32(int32_t x) { return x - (i32x16){0}; }

INLINE f32x16 load_f32(const float *p) { f32x16 v; memcpy(&v, p, 64); return v; }
INLINE void store_f32(float *p, f32x16 v) { memcpy(p, &v, 64); }

INLINE f32v splat_part(float x) { return x - (f32v){0}; }

INLINE f32v load_f32_part(const float *p) { f32v v; memcpy(&v, p, sizeof v); return v; }
INLINE void store_f32_part(float *p, f32v v) { memcpy(p, &v, sizeof v); }

// As many numbers as a register has, at element `i` of a tensor of any type. GCC 12 widens bytes lane by lane: it must
// be told.
INLINE f32v load_part(const void *p, int64_t i, enum dtype type) {
    if (type == F32) return load_f32_part((const float *)p + i);
    if (type == I8) {
        const int8_t *codes = (const int8_t *)p + i;
#if REGISTER == 16
        return (f32v)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)codes)));
#elif REGISTER == 8
        return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)codes)));
#else
        i8v narrow; memcpy(&narrow, codes, sizeof narrow);
        return __builtin_convertvector(__builtin_convertvector(narrow, i32v), f32v);
#endif
    }
    u16v half; memcpy(&half, (const uint16_t *)p + i, sizeof half);
    return (f32v)(__builtin_convertvector(half, u32v) << 16);
}

typedef union { f32x16 v; f32v part[PARTS]; } parts;

// Sixteen words, which must be below 65536, made halves; and the low bytes of any. Here, too, GCC 12 moves them one by
// one.
INLINE u16x16 halves_of(const u32v *part) {
#if REGISTER == 8
    return (u16x16)_mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)part[0], (__m256i)part[1]), 0xD8);
#else
    u32x16 all; memcpy(&all, part, sizeof all);
    return __builtin_convertvector(all, u16x16);
#endif
}

INLINE u8x16 low_bytes(const i32v *part) {
#if REGISTER == 8
    const __m256i low = _mm256_set1_epi32(255);
    __m256i a = _mm256_and_si256((__m256i)part[0], low), b = _mm256_and_si256((__m256i)part[1], low);
    __m256i halves = _mm256_permute4x64_epi64(_mm256_packus_epi32(a, b), 0xD8);
    return (u8x16)_mm_packus_epi16(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
#else
    u32x16 all; memcpy(&all, part, sizeof all);
    return __builtin_convertvector(all, u8x16);
#endif
}

// Sixteen numbers of it.
INLINE f32x16 load(const void *p, int64_t i, enum dtype type) {
    parts x;
#pragma GCC unroll 4
    for (int k = 0; k < PARTS; k++) x.part[k] = load_part(p, i + k * REGISTER, type);
    return x.v;
}

// Round to nearest, ties to even; NaN stays NaN.
INLINE u16x16 to_bf16(f32x16 v) {
    const parts x = {v};
    u32v halves[PARTS];
#pragma GCC unroll 4
    for (int k = 0; k < PARTS; k++) {
        u32v bits = (u32v)x.part[k], number = (u32v)(x.part[k] == x.part[k]);
        u32v rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
        halves[k] = (rounded & number) | (0x7fc0 & ~number);
    }
    return halves_of(halves);
}

INLINE void store(void *p, int64_t i, enum dtype type, f32x16 v) {
    if (type == F32) { store_f32((float *)p + i, v); return; }
    u16x16 half = to_bf16(v); memcpy((uint16_t *)p + i, &half, 32);
}

// The last, incomplete sixteen of a row: `count` lanes, the rest zero.
INLINE f32x16 load_tail(const void *p, int64_t i, enum dtype type, int count) {
    char buffer[64] = {0};
    int size = type == F32 ? 4 : 2;
    memcpy(buffer, (const char *)p + i * size, count * size);
    return load(buffer, 0, type);
}

INLINE void store_tail(void *p, int64_t i, enum dtype type, f32x16 v, int count) {
    char buffer[64];
    int size = type == F32 ? 4 : 2;
    store(buffer, 0, type, v);
    memcpy((char *)p + i * size, buffer, count * size);
}

// a * b + c, rounded once where the machine can.
INLINE f32v fma_part(f32v a, f32v b, f32v c) {
#if REGISTER == 16
    return (f32v)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif REGISTER == 8
    return _mm256_fmadd_ps(a, b, c);
#else
    return a * b + c;
#endif
}

INLINE f32x16 fma16(f32x16 a, f32x16 b, f32x16 c) {
    parts x = {a}, y = {b}, z = {c};
#pragma GCC unroll 4
    for (int k = 0; k < PARTS; k++) z.part[k] = fma_part(x.part[k], y.part[k], z.part[k]);
    return z.v;
}

INLINE f32x16 pick(i32x16 mask, f32x16 yes, f32x16 no) {
    return (f32x16)(((i32x16)yes & mask) | ((i32x16)no & ~mask));
}

INLINE f32x16 max16(f32x16 a, f32x16 b) { return pick(a > b, a, b); }

INLINE f32v max_part(f32v a, f32v b) {
    i32v more = a > b;
    return (f32v)(((i32v)a & more) | ((i32v)b & ~more));
}

INLINE float reduce_sum(f32x16 v) {
    float lanes[16]; store_f32(lanes, v);
    for (int width = 8; width; width /= 2)
        for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
    return lanes[0];
}

INLINE float reduce_max(f32x16 v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#else
    float lanes[16]; store_f32(lanes, v);
    float top = lanes[0];
    for (int i = 1; i < 16; i++) top = lanes[i] > top ? lanes[i] : top;
    return top;
#endif
}

// Nearest integer, by adding 1.5 * 2^23; for |x| below 2^22.
INLINE i32x16 round_i32(f32x16 x) { return (i32x16)(x + 12582912.0f) - 0x4B400000; }
INLINE i32v round_part(f32v x) { return (i32v)(x + 12582912.0f) - 0x4B400000; }

// e^x within 2 units in the last place up to 88, where it stays; 0 below -87; NaN of NaN.
INLINE f32x16 exp16(f32x16 x) {
    f32x16 low = splat(-87.0f), high = splat(88.0f), clamped = max16(x, low);
    clamped = pick(clamped > high, high, clamped);
    i32x16 n = round_i32(clamped * 1.44269504f);
    f32x16 whole = __builtin_convertvector(n, f32x16);
    f32x16 r = fma16(whole, splat(-0.693359375f), clamped);
    r = fma16(whole, splat(2.12194440e-4f), r);
    f32x16 y = splat(1.0f / 720);
    y = fma16(y, r, splat(1.0f / 120));
    y = fma16(y, r, splat(1.0f / 24));
    y = fma16(y, r, splat(1.0f / 6));
    y = fma16(y, r, splat(0.5f));
    y = fma16(y, r, splat(1.0f));
    y = fma16(y, r, splat(1.0f));
    f32x16 result = (f32x16)((i32x16)y + (n << 23));
    return pick(x == x, pick(x < low, splat(0.0f), result), x);
}
