// Pages of fresh memory, taken before they are wanted.
#include <stdint.h>

// Takes those from `at` on that nobody has, one after the other, until `*stop` is set. What is written there already
// stays, whoever writes beside this; unlike madvise it does not keep the process's other threads from mapping memory.
void motley_touch(char *at, int64_t nbytes, int64_t page, const volatile int32_t *stop) {
    for (int64_t done = 0; done < nbytes && !*stop; done += page) {
        char zero = 0;
        __atomic_compare_exchange_n(at + done, &zero, 0, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    }
}
