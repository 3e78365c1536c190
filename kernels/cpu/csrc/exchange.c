// Sums and gathers among processes of one host, through memory that they share.
//
//     line 0      aborted             a rank that gives up, or is given up, ends all waiting
//     line 1 + r  arrived[r]          how many exchanges rank r has put its data in for
//     slots       [2][size][capacity]
//
// In exchange e every rank copies its data to slot [e % 2][rank], counts itself in, waits for the others and reads all
// slots. Nobody writes a slot that another may still read: to begin exchange e + 2 all must have come to e + 1, and
// so have left e.
#include <errno.h>
#include <sched.h>
#include <stdatomic.h>
#include <time.h>

#include "simd.h"

#define LINE 64
#define SPINS 4096         // some 50 us: ranks of one step come within that of each other
#define YIELDS 64          // between looks at the clock
#define PATIENT_NS 2000000 // then whoever waits sleeps between its looks

typedef struct {
    char *memory;
    int64_t rank, size, capacity, timeout_ns;
    uint64_t done;  // exchanges that this rank has been through
} exchange;

enum { ALL_CAME = 0, LATE = 1, ABORTED = 2 };

static _Atomic int *aborted(const exchange *e) { return (_Atomic int *)e->memory; }
static _Atomic uint64_t *arrived(const exchange *e, int64_t rank) {
    return (_Atomic uint64_t *)(e->memory + LINE * (1 + rank));
}
static char *slot(const exchange *e, uint64_t turn, int64_t rank) {
    return e->memory + LINE * (1 + e->size) + ((int64_t)(turn % 2) * e->size + rank) * e->capacity;
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ll + t.tv_nsec;
}

INLINE void relax(void) {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int wait_for(const exchange *e, int64_t rank, uint64_t turn) {
    int64_t began = 0, waited = 0;
    for (int64_t look = 0;; look++) {
        if (atomic_load_explicit(arrived(e, rank), memory_order_acquire) >= turn) return ALL_CAME;
        if (atomic_load_explicit(aborted(e), memory_order_relaxed)) return ABORTED;
        if (look < SPINS) { relax(); continue; }
        if (waited > PATIENT_NS) nanosleep(&(struct timespec){0, 50000}, NULL);
        else sched_yield();
        if (look % YIELDS && waited <= PATIENT_NS) continue;
        if (!began) began = now_ns();
        waited = now_ns() - began;
        if (waited > e->timeout_ns) {
            atomic_store(aborted(e), 1);
            return LATE;
        }
    }
}

// Puts `bytes` (at most the capacity) of this rank's data in, and waits until all ranks have. Returns 0, or why not.
int motley_exchange(exchange *e, const void *data, int64_t bytes) {
    uint64_t turn = e->done + 1;
    if (atomic_load_explicit(aborted(e), memory_order_relaxed)) return ABORTED;
    memcpy(slot(e, turn, e->rank), data, bytes);
    atomic_store_explicit(arrived(e, e->rank), turn, memory_order_release);
    for (int64_t rank = 0; rank < e->size; rank++) {
        int why = rank == e->rank ? ALL_CAME : wait_for(e, rank, turn);
        if (why != ALL_CAME) return why;
    }
    e->done = turn;
    return ALL_CAME;
}

// What a rank put in last time.
const void *motley_exchanged(const exchange *e, int64_t rank) { return slot(e, e->done, rank); }

// x [n] = the sum of all ranks' x, in the order of ranks, formed in fp32 and rounded once.
int motley_sum(exchange *e, void *x, int64_t n, int type) {
    int64_t itemsize = type == F32 ? 4 : 2, most = e->capacity / itemsize;
    for (int64_t first = 0; first < n; first += most) {
        int64_t count = MIN(most, n - first);
        char *out = (char *)x + first * itemsize;
        int why = motley_exchange(e, out, count * itemsize);
        if (why != ALL_CAME) return why;
        // Slots are whole lines, so that lanes beyond the last element are there to be read.
        for (int64_t i = 0; i < count; i += LANES) {
            f32x16 total = load(slot(e, e->done, 0), i, type);
            for (int64_t rank = 1; rank < e->size; rank++) total += load(slot(e, e->done, rank), i, type);
            if (type == F32) memcpy(out + i * 4, &total, 4 * MIN(LANES, count - i));
            else { u16x16 half = to_bf16(total); memcpy(out + i * 2, &half, 2 * MIN(LANES, count - i)); }
        }
    }
    return ALL_CAME;
}

void motley_abort(const exchange *e) { atomic_store(aborted(e), 1); }
