// Paged attention with grouped KV heads: decodes and prefill chunks alike.
//
//   cache   [num_blocks][2][KH][D * 16]: for one block and head K is [D][16] and V is [16][D]; of int8 16 scales
//           in fp32 follow, one for each token: a vector is its codes times its scale
//   tile    some new tokens of one sequence; with the query heads of one KV head they make the rows of a task
//
// Keys are taken in steps of 64, at absolute positions. Every row does the same arithmetic on the same keys in
// the same order, whichever tile or thread it is in; keys it may not see add exact zeros.
#include <math.h>
#include <stdlib.h>
#include "pool.h"
#include "simd.h"

#define BLOCK 16
#define STEP_BLOCKS 4
#define STEP_KEYS (BLOCK * STEP_BLOCKS)

typedef struct {
    const void *q;             // [T][H][D], rows q_stride elements apart
    const void *cache;
    void *out;                 // [T][H][D]
    const int64_t *positions;  // [T]
    const int32_t *tables;     // [S][table_stride] block ids
    const int32_t *tiles;      // [num_tiles][3]: sequence, first row, rows
    int64_t num_tiles, table_stride, q_stride, heads, kv_heads, head_dim, window, type, kv_type;
    float scale;
} attention_args;

typedef struct {
    float *q, *acc, *scores;  // [rows][D], [rows][D], [rows][64]
    f32x16 *total;            // [rows], by lane
    float *top;               // [rows]
    int64_t *position;        // [rows]
} task_memory;

// Vectors of 16 at once for which `rows` rows leave registers: there are 32 of 16 lanes, or 16 of 8.
#define VECTORS_OF(rows) (REGISTER == 16 || (rows) == 1 ? 4 : (rows) == 2 ? 2 : 1)

// scores of `rows` rows with the keys of `width` blocks from `block` on.
INLINE void score_blocks(const float *q, float *scores, const void *const *keys, int64_t dim, enum dtype type,
                         const int rows, const int block, const int width) {
    f32v sum[4][STEP_BLOCKS * PARTS];
#pragma GCC unroll 16
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 16
        for (int c = 0; c < width * PARTS; c++) sum[i][c] = splat_part(0.0f);
    for (int64_t d = 0; d < dim; d++) {
        f32v k[STEP_BLOCKS * PARTS];
#pragma GCC unroll 16
        for (int c = 0; c < width * PARTS; c++)
            k[c] = load_part(keys[block + c / PARTS], d * BLOCK + c % PARTS * REGISTER, type);
#pragma GCC unroll 16
        for (int i = 0; i < rows; i++) {
            f32v x = splat_part(q[i * dim + d]);
#pragma GCC unroll 16
            for (int c = 0; c < width * PARTS; c++) sum[i][c] = fma_part(x, k[c], sum[i][c]);
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 16
        for (int c = 0; c < width * PARTS; c++)
            store_f32_part(scores + i * STEP_KEYS + block * BLOCK + c * REGISTER, sum[i][c]);
}

// With 64 keys; missing blocks repeat the first and are masked later.
INLINE void score_rows(const float *q, float *scores, const void *const *keys, int64_t dim, enum dtype type,
                       const int rows) {
#pragma GCC unroll 4
    for (int block = 0; block < STEP_BLOCKS; block += VECTORS_OF(rows))
        score_blocks(q, scores, keys, dim, type, rows, block, VECTORS_OF(rows));
}

// acc += scores @ V over `count` keys, for `rows` rows and `width` vectors of the head from `d` on.
INLINE void add_values(float *acc, const float *scores, const void *const *values, int count, int64_t d,
                       int64_t dim, enum dtype type, const int rows, const int width) {
    f32v sum[4][4 * PARTS];
#pragma GCC unroll 16
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 16
        for (int c = 0; c < width * PARTS; c++) sum[i][c] = load_f32_part(acc + i * dim + d + c * REGISTER);
    for (int t = 0; t < count; t++) {
        f32v v[4 * PARTS];
#pragma GCC unroll 16
        for (int c = 0; c < width * PARTS; c++)
            v[c] = load_part(values[t / BLOCK], t % BLOCK * dim + d + c * REGISTER, type);
#pragma GCC unroll 16
        for (int i = 0; i < rows; i++) {
            f32v p = splat_part(scores[i * STEP_KEYS + t]);
#pragma GCC unroll 16
            for (int c = 0; c < width * PARTS; c++) sum[i][c] = fma_part(p, v[c], sum[i][c]);
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 16
        for (int c = 0; c < width * PARTS; c++) store_f32_part(acc + i * dim + d + c * REGISTER, sum[i][c]);
}

INLINE void add_values_wide(float *acc, const float *scores, const void *const *values, int count, int64_t dim,
                            enum dtype type, const int rows) {
    const int width = VECTORS_OF(rows);
    int64_t d = 0;
    for (; d + width * LANES <= dim; d += width * LANES)
        add_values(acc, scores, values, count, d, dim, type, rows, width);
    for (; d < dim; d += LANES) add_values(acc, scores, values, count, d, dim, type, rows, 1);
}

INLINE f32x16 scales_of(const void *codes, int64_t dim) {
    return load_f32((const float *)((const char *)codes + dim * BLOCK));
}

// Scores of one row become weights; its running maximum, total and sum are brought to the new maximum.
// With scales: of keys to be multiplied before, and of values into the weights, but not into their total.
INLINE void soften(const task_memory *m, int row, const void *const *keys, const void *const *values,
                   int64_t first_key, int64_t window, int64_t dim, const int scaled) {
    const i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    float *scores = m->scores + row * STEP_KEYS;
    f32x16 s[STEP_BLOCKS], highest = splat(-INFINITY);
    for (int b = 0; b < STEP_BLOCKS; b++) {
        int64_t ago = m->position[row] - first_key - b * BLOCK;  // of the block's first key
        i32x16 age = splat_i32((int32_t)ago) - lane;
        i32x16 seen = (age >= 0) & (age < (int32_t)window);
        f32x16 score = load_f32(scores + b * BLOCK);
        if (scaled) score *= scales_of(keys[b], dim);
        s[b] = pick(seen, score, splat(-INFINITY));
        highest = max16(highest, s[b]);
    }
    float before = m->top[row], top = reduce_max(highest);
    top = top > before ? top : before;
    f32x16 total = m->total[row];
    if (top != before) {
        f32x16 shrink = exp16(splat(before - top));
        total *= shrink;
        for (int64_t d = 0; d < dim; d += LANES)
            store_f32(m->acc + row * dim + d, load_f32(m->acc + row * dim + d) * shrink);
        m->top[row] = top;
    }
    for (int b = 0; b < STEP_BLOCKS; b++) {
        f32x16 p = exp16(s[b] - top);
        total += p;
        store_f32(scores + b * BLOCK, scaled ? p * scales_of(values[b], dim) : p);
    }
    m->total[row] = total;
}

INLINE void run_task(const attention_args *a, const task_memory *m, const int32_t *tile, int64_t kv_head,
                     int64_t first_head, int64_t num_heads, enum dtype type, enum dtype kv) {
    const int64_t dim = a->head_dim, part = dim * BLOCK * (kv == F32 ? 4 : kv == BF16 ? 2 : 1) + (kv == I8 ? 64 : 0);
    const int rows = tile[2] * num_heads;
    const int32_t *table = a->tables + tile[0] * a->table_stride;
    const int64_t oldest = a->positions[tile[1]], newest = a->positions[tile[1] + tile[2] - 1];
    for (int r = 0; r < rows; r++) {
        int64_t token = tile[1] + r / num_heads, head = first_head + r % num_heads;
        for (int64_t d = 0; d < dim; d += LANES) {
            f32x16 x = load(a->q, token * a->q_stride + head * dim + d, type) * a->scale;
            store_f32(m->q + r * dim + d, x);
            store_f32(m->acc + r * dim + d, splat(0.0f));
        }
        m->total[r] = splat(0.0f), m->top[r] = -1e30f, m->position[r] = a->positions[token];
    }
    int64_t key = oldest + 1 > a->window ? (oldest + 1 - a->window) / STEP_KEYS * STEP_KEYS : 0;
    for (; key <= newest; key += STEP_KEYS) {
        const void *keys[STEP_BLOCKS], *values[STEP_BLOCKS];
        for (int b = 0; b < STEP_BLOCKS; b++) {
            int64_t block = table[key / BLOCK + (key + b * BLOCK <= newest ? b : 0)];
            keys[b] = (const char *)a->cache + (block * 2 * a->kv_heads + kv_head) * part;
            values[b] = (const char *)keys[b] + a->kv_heads * part;
        }
        int count = MIN(newest + 1 - key, STEP_KEYS), r = 0;
        for (; r + 4 <= rows; r += 4) score_rows(m->q + r * dim, m->scores + r * STEP_KEYS, keys, dim, kv, 4);
        if (rows - r == 3) score_rows(m->q + r * dim, m->scores + r * STEP_KEYS, keys, dim, kv, 3);
        if (rows - r == 2) score_rows(m->q + r * dim, m->scores + r * STEP_KEYS, keys, dim, kv, 2);
        if (rows - r == 1) score_rows(m->q + r * dim, m->scores + r * STEP_KEYS, keys, dim, kv, 1);
        for (r = 0; r < rows; r++) soften(m, r, keys, values, key, a->window, dim, kv == I8);
        for (r = 0; r + 4 <= rows; r += 4)
            add_values_wide(m->acc + r * dim, m->scores + r * STEP_KEYS, values, count, dim, kv, 4);
        if (rows - r == 3) add_values_wide(m->acc + r * dim, m->scores + r * STEP_KEYS, values, count, dim, kv, 3);
        if (rows - r == 2) add_values_wide(m->acc + r * dim, m->scores + r * STEP_KEYS, values, count, dim, kv, 2);
        if (rows - r == 1) add_values_wide(m->acc + r * dim, m->scores + r * STEP_KEYS, values, count, dim, kv, 1);
    }
    for (int r = 0; r < rows; r++) {
        int64_t token = tile[1] + r / num_heads, head = first_head + r % num_heads;
        float share = 1.0f / reduce_sum(m->total[r]);
        for (int64_t d = 0; d < dim; d += LANES)
            store(a->out, (token * a->heads + head) * dim + d, type, load_f32(m->acc + r * dim + d) * share);
    }
}

typedef struct {
    const attention_args *a;
    int64_t group, splits, heads;  // query heads of a KV head; tasks they are split into; heads of a task
    int *failed;
} job;

static void unit_of_job(const void *context, int64_t unit) {
    const job *j = context;
    const attention_args *a = j->a;
    const int64_t split = unit % j->splits, kv_head = unit / j->splits % a->kv_heads;
    const int32_t *tile = a->tiles + unit / j->splits / a->kv_heads * 3;
    const int64_t first = split * j->heads, count = MIN(j->heads, j->group - first), rows = tile[2] * count;
    const int64_t bytes = rows * (a->head_dim * 8 + STEP_KEYS * 4 + 64 + 8 + 4);
    char *memory = aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (!memory) { *j->failed = 1; return; }
    task_memory m = {.total = (f32x16 *)memory};
    m.q = (float *)(memory + rows * 64), m.acc = m.q + rows * a->head_dim;
    m.scores = m.acc + rows * a->head_dim, m.position = (int64_t *)(m.scores + rows * STEP_KEYS);
    m.top = (float *)(m.position + rows);
    const int64_t head = kv_head * j->group + first;
    if (a->type == F32 && a->kv_type == I8) run_task(a, &m, tile, kv_head, head, count, F32, I8);
    else if (a->type == F32) run_task(a, &m, tile, kv_head, head, count, F32, F32);
    else if (a->kv_type == I8) run_task(a, &m, tile, kv_head, head, count, BF16, I8);
    else run_task(a, &m, tile, kv_head, head, count, BF16, BF16);
    free(memory);
}

// Returns 0, or 1 where memory is refused. head_dim is a multiple of 16; `window` at least 1.
int motley_attention(const attention_args *a, int threads) {
    const int64_t group = a->heads / a->kv_heads, tasks = a->num_tiles * a->kv_heads;
    const int64_t wanted = tasks >= threads ? 1 : MIN(group, (threads + tasks - 1) / tasks);
    const int64_t heads = (group + wanted - 1) / wanted;
    int failed = 0;
    job j = {a, group, (group + heads - 1) / heads, heads, &failed};
    parallel(tasks * j.splits, threads, unit_of_job, &j);
    return failed;
}
