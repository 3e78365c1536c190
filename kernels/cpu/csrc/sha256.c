// SHA-256 (FIPS 180-4) of many leaves of equal size at a time, on x86's SHA instructions.
//
// A round waits for the one before it. Of four streams that go side by side, the waiting is filled: 1.8 times as fast
// as one, on a core of a Zen 5. (Sixteen in AVX-512, without those instructions: 1.9 times.)
#include <stdint.h>
#include <string.h>

#define BLOCK 64
#define STREAMS 4

#if defined(__SHA__) && defined(__SSE4_1__)
#include <immintrin.h>

static const uint32_t K[64] __attribute__((aligned(16))) = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

typedef struct {
    __m128i abef, cdgh;  // as the instructions want them
} state;

static const state START = {
    {(long long)0x510e527f9b05688cULL, (long long)0x6a09e667bb67ae85ULL},
    {(long long)0x1f83d9ab5be0cd19ULL, (long long)0x3c6ef372a54ff53aULL},
};

// So many blocks of each of so many streams.
static inline __attribute__((always_inline)) void blocks(state *of, const uint8_t *const *data, int64_t count,
                                                         const int streams) {
    const __m128i swap = _mm_set_epi64x(0x0c0d0e0f08090a0bLL, 0x0405060700010203LL);
    for (int64_t block = 0; block < count; block++) {
        __m128i w[STREAMS][4];
        state before[STREAMS];
        for (int s = 0; s < streams; s++) before[s] = of[s];
#pragma GCC unroll 16
        for (int r = 0; r < 16; r++) {
            const __m128i k = _mm_load_si128((const __m128i *)&K[4 * r]);
#pragma GCC unroll 4
            for (int s = 0; s < streams; s++) {
                __m128i *const own = w[s];
                if (r < 4) {
                    const uint8_t *const from = data[s] + block * BLOCK + 16 * r;
                    own[r] = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)from), swap);
                } else {
                    __m128i sum = _mm_sha256msg1_epu32(own[r & 3], own[(r + 1) & 3]);
                    sum = _mm_add_epi32(sum, _mm_alignr_epi8(own[(r + 3) & 3], own[(r + 2) & 3], 4));
                    own[r & 3] = _mm_sha256msg2_epu32(sum, own[(r + 3) & 3]);
                }
                const __m128i words = _mm_add_epi32(own[r & 3], k);
                of[s].cdgh = _mm_sha256rnds2_epu32(of[s].cdgh, of[s].abef, words);
                of[s].abef = _mm_sha256rnds2_epu32(of[s].abef, of[s].cdgh, _mm_shuffle_epi32(words, 0x0e));
            }
        }
        for (int s = 0; s < streams; s++) {
            of[s].abef = _mm_add_epi32(of[s].abef, before[s].abef);
            of[s].cdgh = _mm_add_epi32(of[s].cdgh, before[s].cdgh);
        }
    }
}

static void digest_of(const state *of, uint8_t *digest) {
    uint32_t abef[4], cdgh[4];
    _mm_storeu_si128((__m128i *)abef, of->abef);
    _mm_storeu_si128((__m128i *)cdgh, of->cdgh);
    const uint32_t words[8] = {abef[3], abef[2], cdgh[3], cdgh[2], abef[1], abef[0], cdgh[1], cdgh[0]};
    for (int i = 0; i < 8; i++) {
        const uint32_t big = __builtin_bswap32(words[i]);
        memcpy(digest + 4 * i, &big, 4);
    }
}

// Streams of equal length, each to its end.
static inline __attribute__((always_inline)) void whole(const uint8_t *data, int64_t leaf, uint8_t *digests,
                                                        const int streams) {
    state of[STREAMS];
    const uint8_t *at[STREAMS], *last[STREAMS];
    uint8_t ends[STREAMS][2 * BLOCK] = {{0}};
    const int64_t rest = leaf % BLOCK, end = rest + 9 <= BLOCK ? BLOCK : 2 * BLOCK;
    const uint64_t bits = __builtin_bswap64((uint64_t)leaf * 8);
    for (int s = 0; s < streams; s++) {
        of[s] = START;
        at[s] = data + s * leaf;
        memcpy(ends[s], at[s] + leaf - rest, rest);
        ends[s][rest] = 0x80;
        memcpy(ends[s] + end - 8, &bits, 8);
        last[s] = ends[s];
    }
    blocks(of, at, leaf / BLOCK, streams);
    blocks(of, last, end / BLOCK, streams);
    for (int s = 0; s < streams; s++) digest_of(of + s, digests + 32 * s);
}

// Of each `leaf` bytes, and of those that are left at the end. 0; 1: this processor has no such instructions.
int motley_sha256(const uint8_t *data, int64_t bytes, int64_t leaf, uint8_t *digests) {
    int64_t done = 0;
    for (; bytes - done >= STREAMS * leaf; done += STREAMS * leaf, digests += 32 * STREAMS)
        whole(data + done, leaf, digests, STREAMS);
    for (; done < bytes; done += leaf, digests += 32)
        whole(data + done, bytes - done < leaf ? bytes - done : leaf, digests, 1);
    return 0;
}

#else

int motley_sha256(const uint8_t *data, int64_t bytes, int64_t leaf, uint8_t *digests) {
    (void)data, (void)bytes, (void)leaf, (void)digests, (void)BLOCK, (void)STREAMS;
    return 1;
}

#endif
