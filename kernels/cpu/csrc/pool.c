// Helper threads that may come late.
//
// A decode step is hundreds of products of some 50 microseconds. OpenMP ends each with a barrier: one thread that
// the system has put aside for 4 ms holds up all others, and on a shared machine a step took ten times as long on
// two threads as on one. Here units are handed out one by one, and the caller waits for no helper that has not
// begun one: at worst it does all the work itself.
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include "pool.h"

#define MAX_HELPERS 255
#define SPINS 4000  // of a helper before it sleeps: some 50 microseconds, longer than a caller is away between jobs

static struct {
    void (*work)(const void *context, int64_t unit);
    const void *context;
    _Atomic int64_t units;
    _Atomic int64_t next;     // unit to be taken
    _Atomic int open;         // how many helpers may take part; 0 when there is no job
    _Atomic int active;       // helpers that are looking at the job
    _Atomic int sleeping;
    _Atomic bool busy;        // a caller owns the pool
    int helpers;
    pthread_mutex_t lock;
    pthread_cond_t wake;
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER};

static inline void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void take_units(void) {
    for (int64_t unit; (unit = atomic_fetch_add(&pool.next, 1)) < pool.units;) pool.work(pool.context, unit);
}

static void await_job(int index) {
    for (int i = 0; i < SPINS; i++, relax())
        if (atomic_load(&pool.open) > index) return;
    pthread_mutex_lock(&pool.lock);
    atomic_fetch_add(&pool.sleeping, 1);
    while (atomic_load(&pool.open) <= index) pthread_cond_wait(&pool.wake, &pool.lock);
    atomic_fetch_sub(&pool.sleeping, 1);
    pthread_mutex_unlock(&pool.lock);
}

// The caller closes the job and then waits until nobody is active; a helper says that it is active and then looks
// whether the job is open. Whichever comes second sees the other.
static void *helper(void *argument) {
    const int index = (int)(intptr_t)argument;
    for (;;) {
        await_job(index);
        atomic_fetch_add(&pool.active, 1);
        if (atomic_load(&pool.open) > index) take_units();
        atomic_fetch_sub(&pool.active, 1);
        while (atomic_load(&pool.open) > index && atomic_load(&pool.next) >= pool.units) relax();
    }
    return 0;
}

static void after_fork(void) {  // in the child, where the helpers are gone
    pool.helpers = 0;
    atomic_store(&pool.open, 0), atomic_store(&pool.active, 0), atomic_store(&pool.sleeping, 0);
    atomic_store(&pool.busy, false);
    pthread_mutex_init(&pool.lock, 0), pthread_cond_init(&pool.wake, 0);
}

static void grow(int helpers) {
    static bool registered;
    if (!registered) pthread_atfork(0, 0, after_fork), registered = true;
    for (pthread_t thread; pool.helpers < helpers; pool.helpers++) {
        if (pthread_create(&thread, 0, helper, (void *)(intptr_t)pool.helpers)) return;
        pthread_detach(thread);
    }
}

void parallel(int64_t units, int threads, void (*work)(const void *, int64_t), const void *context) {
    const int helpers = (int)((units < threads ? units : threads) - 1);
    if (helpers < 1 || atomic_exchange(&pool.busy, true)) {  // nothing to share, or another caller has the helpers
        for (int64_t unit = 0; unit < units; unit++) work(context, unit);
        return;
    }
    if (pool.helpers < helpers) grow(helpers < MAX_HELPERS ? helpers : MAX_HELPERS);
    pool.work = work, pool.context = context, pool.units = units;
    atomic_store(&pool.next, 0);
    atomic_store(&pool.open, helpers);
    if (atomic_load(&pool.sleeping)) {
        pthread_mutex_lock(&pool.lock);
        pthread_cond_broadcast(&pool.wake);
        pthread_mutex_unlock(&pool.lock);
    }
    take_units();
    atomic_store(&pool.open, 0);
    for (int i = 0; atomic_load(&pool.active); i++)
        if (i < 1000) relax();
        else sched_yield();
    atomic_store(&pool.busy, false);
}
