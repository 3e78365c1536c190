// Sums and gathers among processes of one host, through memory that they share.
//
//     line 0      aborted             a rank that gives up, or is given up, ends all waiting
//     line 1 + r  arrived[r]          how many exchanges rank r has put its data in for
//                 thread[r]           the thread that did so last
//     slots       [2][size][capacity]
//
// In exchange e every rank copies its data to slot [e % 2][rank], counts itself in, waits for the others and reads all
// slots. Nobody writes a slot that another may still read: to begin exchange e + 2 all must have come to e + 1, and
// so have left e.
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "simd.h"

#define LINE 64
#define SPINS 4096         // some 50 us: ranks of one step come within that of each other
#define YIELDS 64          // between looks at the clock
#define PATIENT_NS 2000000 // then whoever waits sleeps between its looks
#define LOOK_NS 20000000   // so often it asks the kernel whether the other's thread runs
#define HELD_UP_NS 10000000 // more between two looks is not the other's doing: whoever waits was held up itself
#define MOST_TIMEOUTS 12   // a thread that only seems to run is given up after so many

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

static _Atomic int32_t *thread_of(const exchange *e, int64_t rank) {
    return (_Atomic int32_t *)(e->memory + LINE * (1 + rank) + sizeof(uint64_t));
}

// Whether a rank's thread has work that the kernel has not finished: it computes, waits for a CPU or for a disk.
static int runs(int32_t thread) {
    char path[32], text[512];
    if (!thread) return 0;
    snprintf(path, sizeof path, "/proc/%d/stat", thread);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return 0;
    ssize_t length = read(file, text, sizeof text - 1);
    close(file);
    if (length <= 0) return 0;
    text[length] = 0;
    const char *state = strrchr(text, ')');  // the name before it may contain anything
    return state && state[1] && (state[2] == 'R' || state[2] == 'D');
}

// A rank is lost once its thread has stood still for timeout_ns, as one that has ended, is stopped or hangs does. One
// that runs is waited for, since a busy machine or a slow disk may keep it for seconds.
static int wait_for(const exchange *e, int64_t rank, uint64_t turn) {
    int64_t began = 0, waited = 0, still = 0, looked = 0;
    for (int64_t look = 0;; look++) {
        if (atomic_load_explicit(arrived(e, rank), memory_order_acquire) >= turn) return ALL_CAME;
        if (atomic_load_explicit(aborted(e), memory_order_relaxed)) return ABORTED;
        if (look < SPINS) { relax(); continue; }
        if (waited > PATIENT_NS) nanosleep(&(struct timespec){0, 50000}, NULL);
        else sched_yield();
        if (look % YIELDS && waited <= PATIENT_NS) continue;
        int64_t now = now_ns();
        if (!began) began = now;
        int64_t since = now - began - waited;
        waited += since;
        still += MIN(since, HELD_UP_NS);
        if (waited - looked > LOOK_NS) {
            looked = waited;
            if (runs(atomic_load_explicit(thread_of(e, rank), memory_order_relaxed))) still = 0;
        }
        if (still > e->timeout_ns || waited > MOST_TIMEOUTS * e->timeout_ns) {
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
    static _Thread_local int32_t own;
    if (!own) own = (int32_t)syscall(SYS_gettid);
    atomic_store_explicit(thread_of(e, e->rank), own, memory_order_relaxed);
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
