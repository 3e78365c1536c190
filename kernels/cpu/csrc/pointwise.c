// What lies between the matrix products: norms, rotary embedding with the KV write, the MLP's gate.
#include <math.h>
#include "pool.h"
#include "simd.h"

#define BLOCK 16
#define UNIT_ROWS 8  // rows that one thread takes at a time: fewer are not worth sharing

// One row of n numbers: y = x / rms(x) * weight. x may have been `residual` + `x`, which is kept in `total`.
INLINE void norm_row(const void *x, const void *residual, void *total, const void *weight, void *y, int64_t row,
                     int64_t n, float eps, enum dtype type) {
    const int64_t first = row * n, whole = n / LANES * LANES;
    const int rest = n - whole;
    f32x16 squares = splat(0.0f);
    for (int64_t i = 0; i < n; i += LANES) {
        int tail = i == whole;
        f32x16 v = tail ? load_tail(x, first + i, type, rest) : load(x, first + i, type);
        if (residual) {
            v += tail ? load_tail(residual, first + i, type, rest) : load(residual, first + i, type);
            if (tail) store_tail(total, first + i, type, v, rest);
            else store(total, first + i, type, v);
            if (type == BF16) v = (f32x16)(__builtin_convertvector(to_bf16(v), u32x16) << 16);  // as stored
        }
        squares = fma16(v, v, squares);
    }
    float scale = 1.0f / sqrtf(reduce_sum(squares) / n + eps);
    const void *from = residual ? total : x;
    for (int64_t i = 0; i < whole; i += LANES)
        store(y, first + i, type, load(from, first + i, type) * scale * load(weight, i, type));
    if (rest)
        store_tail(y, first + whole, type,
                   load_tail(from, first + whole, type, rest) * scale * load_tail(weight, whole, type, rest), rest);
}

typedef struct {
    const void *x, *residual, *weight;
    void *total, *y;
    int64_t rows, n;
    float eps;
    int type;
} norm_job;

static void norm_unit(const void *context, int64_t unit) {
    const norm_job *j = context;
    for (int64_t row = unit * UNIT_ROWS; row < MIN((unit + 1) * UNIT_ROWS, j->rows); row++)
        if (j->type == F32) norm_row(j->x, j->residual, j->total, j->weight, j->y, row, j->n, j->eps, F32);
        else norm_row(j->x, j->residual, j->total, j->weight, j->y, row, j->n, j->eps, BF16);
}

// x, residual, total, y [rows][n]; residual and total may be NULL together.
void motley_norm(const void *x, const void *residual, void *total, const void *weight, void *y, int64_t rows,
                 int64_t n, float eps, int type, int threads) {
    norm_job j = {x, residual, weight, total, y, rows, n, eps, type};
    parallel((rows + UNIT_ROWS - 1) / UNIT_ROWS, threads, norm_unit, &j);
}

INLINE f32x16 gated(f32x16 gate, f32x16 up) { return gate / (1.0f + exp16(-gate)) * up; }

INLINE void gate_row(const void *gate_up, void *y, int64_t row, int64_t n, enum dtype type) {
    const int64_t gate = row * 2 * n, up = gate + n, whole = n / LANES * LANES;
    const int rest = n - whole;
    for (int64_t i = 0; i < whole; i += LANES)
        store(y, row * n + i, type, gated(load(gate_up, gate + i, type), load(gate_up, up + i, type)));
    if (rest)
        store_tail(y, row * n + whole, type,
                   gated(load_tail(gate_up, gate + whole, type, rest), load_tail(gate_up, up + whole, type, rest)),
                   rest);
}

typedef struct {
    const void *gate_up;
    void *y;
    int64_t n;
    int type;
} gate_job;

static void gate_unit(const void *context, int64_t row) {
    const gate_job *j = context;
    if (j->type == F32) gate_row(j->gate_up, j->y, row, j->n, F32);
    else gate_row(j->gate_up, j->y, row, j->n, BF16);
}

// gate_up [rows][2 * n] -> y [rows][n] = silu(gate) * up
void motley_silu_mul(const void *gate_up, void *y, int64_t rows, int64_t n, int type, int threads) {
    gate_job j = {gate_up, y, n, type};
    parallel(rows, threads, gate_unit, &j);
}

typedef struct {
    const void *q, *k, *v;    // [T][heads][D]; rows q_stride, k_stride, v_stride elements apart
    const float *cos, *sin;   // [T][D / 2]
    const int64_t *slots;     // [T]
    void *q_out, *cache;      // [T][H][D]; as in attention.c
    int64_t tokens, heads, kv_heads, head_dim, q_stride, k_stride, v_stride, type, kv_type;
} rotary_args;

INLINE float get(const void *p, int64_t i, enum dtype type) {
    if (type == F32) return ((const float *)p)[i];
    uint32_t bits = (uint32_t)((const uint16_t *)p)[i] << 16;
    float x; memcpy(&x, &bits, 4);
    return x;
}

INLINE void put(void *p, int64_t i, enum dtype type, float x) {
    if (type == F32) { ((float *)p)[i] = x; return; }
    uint32_t bits; memcpy(&bits, &x, 4);
    ((uint16_t *)p)[i] = x == x ? (bits + 0x7fff + ((bits >> 16) & 1)) >> 16 : 0x7fc0;
}

// A vector as codes, `step` apart, and its scale: absmax / 127, the nearest code, halves to even; the scale of what is
// not finite is NaN.
static void put_codes(const float *x, int64_t dim, int8_t *codes, int64_t step, float *scale) {
    float most = 0;
    int finite = 1;
    for (int64_t i = 0; i < dim; i++) {
        float size = fabsf(x[i]);
        finite &= size < INFINITY;
        most = size > most ? size : most;
    }
    *scale = finite ? most / 127 : NAN;
    const float unit = finite && *scale > 0 ? *scale : INFINITY;
    for (int64_t i = 0; i < dim; i++) codes[i * step] = finite ? (int8_t)(x[i] / unit + 12582912.0f - 12582912.0f) : 0;
}

INLINE void rotate_row(const rotary_args *a, int64_t t, enum dtype type, enum dtype kv) {
    const int64_t dim = a->head_dim, half = dim / 2;
    const float *cos = a->cos + t * half, *sin = a->sin + t * half;
    for (int64_t h = 0; h < a->heads; h++) {
        const int64_t from = t * a->q_stride + h * dim, to = (t * a->heads + h) * dim;
        for (int64_t i = 0; i < half; i++) {
            float x = get(a->q, from + i, type), y = get(a->q, from + half + i, type);
            put(a->q_out, to + i, type, x * cos[i] - y * sin[i]);
            put(a->q_out, to + half + i, type, y * cos[i] + x * sin[i]);
        }
    }
    const int64_t block = a->slots[t] / BLOCK, offset = a->slots[t] % BLOCK;
    float rotated[dim], whole[dim];
    const int64_t part = dim * BLOCK + (kv == I8 ? 64 : 0);
    for (int64_t h = 0; h < a->kv_heads; h++) {
        const int64_t from = t * a->k_stride + h * dim, vfrom = t * a->v_stride + h * dim;
        const int64_t keys = (block * 2 * a->kv_heads + h) * part, values = keys + a->kv_heads * part;
        for (int64_t i = 0; i < half; i++) {
            float x = get(a->k, from + i, type), y = get(a->k, from + half + i, type);
            rotated[i] = x * cos[i] - y * sin[i], rotated[half + i] = y * cos[i] + x * sin[i];
        }
        for (int64_t i = 0; i < dim; i++) whole[i] = get(a->v, vfrom + i, type);
        if (kv == I8) {
            int8_t *k = (int8_t *)a->cache + keys, *v = (int8_t *)a->cache + values;
            put_codes(rotated, dim, k + offset, BLOCK, (float *)(k + dim * BLOCK) + offset);
            put_codes(whole, dim, v + offset * dim, 1, (float *)(v + dim * BLOCK) + offset);
            continue;
        }
        for (int64_t i = 0; i < dim; i++) put(a->cache, keys + i * BLOCK + offset, type, rotated[i]);
        for (int64_t i = 0; i < dim; i++) put(a->cache, values + offset * dim + i, type, whole[i]);
    }
}

static void rotate_unit(const void *context, int64_t unit) {
    const rotary_args *a = context;
    for (int64_t t = unit * UNIT_ROWS; t < MIN((unit + 1) * UNIT_ROWS, a->tokens); t++)
        if (a->type == F32 && a->kv_type == I8) rotate_row(a, t, F32, I8);
        else if (a->type == F32) rotate_row(a, t, F32, F32);
        else if (a->kv_type == I8) rotate_row(a, t, BF16, I8);
        else rotate_row(a, t, BF16, BF16);
}

// Rotate the halves of q and k by their positions; q to q_out, k and v to their slots of the cache.
void motley_rotary_write(const rotary_args *a, int threads) {
    parallel((a->tokens + UNIT_ROWS - 1) / UNIT_ROWS, threads, rotate_unit, a);
}
