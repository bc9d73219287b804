/* The first of 8 numbers or codes, with 256-bit registers; FOR_AVX2 is defined where this is included. */

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define AVX2_INLINE static inline __attribute__((always_inline)) FOR_AVX2
enum { WIDTH = 8 };

/* The first n of 8 lanes. */
AVX2_INLINE __m256i first_of_8(int64_t n)
{
    const __m256i number = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n < WIDTH ? (int32_t)n : WIDTH), number);
}

AVX2_INLINE __m256 some_8(const float *x, int64_t n)
{
    return n >= WIDTH ? _mm256_loadu_ps(x) : _mm256_maskload_ps(x, first_of_8(n));
}

/* 8 codes from `from` on, or `n` where there are fewer. */
AVX2_INLINE __m128i some_codes(const char *from, int64_t n)
{
    int64_t codes = 0;
    if (n >= WIDTH)
        memcpy(&codes, from, WIDTH);
    else
        memcpy(&codes, from, (size_t)n);
    return _mm_cvtsi64_si128(codes);
}
