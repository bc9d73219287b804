/* AVX-512, VNNI, BF16, AVX-VNNI and AMX in portable C, for tests on CPUs with AVX2 alone.
 *
 * In front of the compiler's header (`-I`), for sources that are compiled with NC_EMULATED: first the compiler's
 * own, then SIMDe's, then what SIMDe lacks or does in another way than a CPU. NC_EMULATED is defined as a hash
 * of this folder, so that a library of another state of it is not taken.
 */
#ifndef EMULATED_IMMINTRIN_H
#define EMULATED_IMMINTRIN_H
#include_next <immintrin.h>
#ifdef __SANITIZE_ADDRESS__ /* checks that are inlined take minutes to compile */
#define SIMDE_NO_INLINE
#endif
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#include <simde/x86/f16c.h>
#include <simde/x86/fma.h>

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "tiles.h"

#define EMULATED static inline __attribute__((unused))
#define EACH(n) for (int i = 0; i < (n); i++)

/* A function of each of n elements `v` of type T, of a vector V to a vector W of type U. */
#define EACH_OF(name, W, U, V, T, n, what)      \
    EMULATED W emulated_##name(V from)          \
    {                                           \
        T x[n];                                 \
        U y[n];                                 \
        W to;                                   \
        memcpy(x, &from, sizeof x);             \
        EACH(n)                                 \
        {                                       \
            const T v = x[i];                   \
            y[i] = (U)(what);                   \
        }                                       \
        memcpy(&to, y, sizeof y);               \
        return to;                              \
    }
EACH_OF(cvtepi32_epi8, __m128i, int8_t, __m512i, int32_t, 16, v)
EACH_OF(cvtsepi32_epi8, __m128i, int8_t, __m512i, int32_t, 16, v < -128 ? -128 : v > 127 ? 127 : v)
EACH_OF(cvtusepi32_epi8, __m128i, uint8_t, __m512i, uint32_t, 16, v > 255 ? 255 : v)
EACH_OF(cvtepi32_epi16, __m256i, int16_t, __m512i, int32_t, 16, v)
EACH_OF(cvtepu8_epi32, __m512i, int32_t, __m128i, uint8_t, 16, v)
EACH_OF(cvtepi8_epi32, __m512i, int32_t, __m128i, int8_t, 16, v)
EACH_OF(cvtps_pd, __m512d, double, __m256, float, 8, v)
EACH_OF(cvtpd_ps, __m256, float, __m512d, double, 8, v)
#undef _mm512_cvtepi32_epi8
#undef _mm512_cvtsepi32_epi8
#undef _mm512_cvtusepi32_epi8
#undef _mm512_cvtepi32_epi16
#undef _mm512_cvtepu8_epi32
#undef _mm512_cvtepi8_epi32
#undef _mm512_cvtps_pd
#undef _mm512_cvtpd_ps
#define _mm512_cvtepi32_epi8 emulated_cvtepi32_epi8
#define _mm512_cvtsepi32_epi8 emulated_cvtsepi32_epi8
#define _mm512_cvtusepi32_epi8 emulated_cvtusepi32_epi8
#define _mm512_cvtepi32_epi16 emulated_cvtepi32_epi16
#define _mm512_cvtepu8_epi32 emulated_cvtepu8_epi32
#define _mm512_cvtepi8_epi32 emulated_cvtepi8_epi32
#define _mm512_cvtps_pd emulated_cvtps_pd
#define _mm512_cvtpd_ps emulated_cvtpd_ps

/* All 16 elements, halves with each other: the order in which compilers do it. */
#define REDUCE(name, what)                                       \
    EMULATED float emulated_reduce_##name(__m512 v)              \
    {                                                            \
        float x[16];                                             \
        memcpy(x, &v, sizeof x);                                 \
        for (int half = 8; half; half /= 2)                      \
            EACH(half)                                           \
            {                                                    \
                const float a = x[i + half], b = x[i];           \
                x[i] = what;                                     \
            }                                                    \
        return x[0];                                             \
    }
REDUCE(add, a + b)
REDUCE(max, a > b ? a : b)
REDUCE(min, a < b ? a : b)
#undef _mm512_reduce_add_ps
#undef _mm512_reduce_max_ps
#undef _mm512_reduce_min_ps
#define _mm512_reduce_add_ps emulated_reduce_add
#define _mm512_reduce_max_ps emulated_reduce_max
#define _mm512_reduce_min_ps emulated_reduce_min

/* Memory that a mask leaves out is neither read nor written; SIMDe writes whole registers. */
#define MASKED(name, V, T, K, n)                                              \
    EMULATED V emulated_load_##name(V other, K mask, const void *from)        \
    {                                                                         \
        T x[n];                                                               \
        memcpy(x, &other, sizeof x);                                          \
        EACH(n)                                                               \
            if (mask >> i & 1)                                                \
                memcpy(&x[i], (const char *)from + i * sizeof(T), sizeof(T)); \
        memcpy(&other, x, sizeof x);                                          \
        return other;                                                         \
    }                                                                         \
    EMULATED void emulated_store_##name(void *to, K mask, V v)                \
    {                                                                         \
        T x[n];                                                               \
        memcpy(x, &v, sizeof x);                                              \
        EACH(n)                                                               \
            if (mask >> i & 1)                                                \
                memcpy((char *)to + i * sizeof(T), &x[i], sizeof(T));         \
    }
MASKED(ps, __m512, float, __mmask16, 16)
MASKED(epi8, __m128i, int8_t, __mmask16, 16)
#undef _mm512_mask_loadu_ps
#undef _mm512_maskz_loadu_ps
#undef _mm512_mask_storeu_ps
#undef _mm_maskz_loadu_epi8
#undef _mm_mask_storeu_epi8
#undef _mm512_mask_cvtusepi32_storeu_epi8
#define _mm512_mask_loadu_ps emulated_load_ps
#define _mm512_maskz_loadu_ps(mask, from) emulated_load_ps(_mm512_setzero_ps(), mask, from)
#define _mm512_mask_storeu_ps emulated_store_ps
#define _mm_maskz_loadu_epi8(mask, from) emulated_load_epi8(_mm_setzero_si128(), mask, from)
#define _mm_mask_storeu_epi8 emulated_store_epi8
#define _mm512_mask_cvtusepi32_storeu_epi8(to, mask, v) emulated_store_epi8(to, mask, emulated_cvtusepi32_epi8(v))

EMULATED __mmask16 emulated_test_epi8_mask(__m128i a, __m128i b)
{
    const __m128i none = _mm_cmpeq_epi8(_mm_and_si128(a, b), _mm_setzero_si128());
    return (__mmask16)~_mm_movemask_epi8(none);
}
#undef _mm_test_epi8_mask
#define _mm_test_epi8_mask emulated_test_epi8_mask

/* a * 2^b, rounded once: SIMDe multiplies by 2^b, which is infinite or 0 where the result is neither. */
EMULATED __m512 emulated_scalef(__m512 a, __m512 b)
{
    float x[16], by[16];
    memcpy(x, &a, sizeof x);
    memcpy(by, &b, sizeof by);
    EACH(16)
    {
        const double power = __builtin_floor((double)by[i]);
        const double near = power < -512 ? -512 : power > 512 ? 512 : power;
        x[i] = by[i] != by[i] ? by[i] : (float)__builtin_ldexp((double)x[i], (int)near);
    }
    memcpy(&a, x, sizeof x);
    return a;
}
#undef _mm512_scalef_ps
#define _mm512_scalef_ps emulated_scalef

/* SIMDe keeps the sign of -0. */
EMULATED __m512 emulated_abs(__m512 v)
{
    const __m512i all_but_sign = _mm512_set1_epi32(0x7fffffff);
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(v), all_but_sign));
}
#undef _mm512_abs_ps
#define _mm512_abs_ps emulated_abs

/* 1 / v with as few bits as a CPU may give, so that code which needs more is noticed: SIMDe gives all of them. */
EMULATED __m512 emulated_rcp14(__m512 v)
{
    const __m512i all = _mm512_castps_si512(_mm512_div_ps(_mm512_set1_ps(1), v));
    return _mm512_castsi512_ps(_mm512_and_si512(all, _mm512_set1_epi32(~0x1ff)));
}
#undef _mm512_rcp14_ps
#define _mm512_rcp14_ps emulated_rcp14

/* Odd products, then even ones, each added with one rounding. */
EMULATED __m512i emulated_dpbf16(__m512i sums, __m512i x, __m512i w)
{
    float sum[16];
    uint8_t of_x[64], of_w[64];
    memcpy(sum, &sums, sizeof sum);
    memcpy(of_x, &x, sizeof of_x);
    memcpy(of_w, &w, sizeof of_w);
    EACH(16)
    {
        sum[i] = emulated_normal(sum[i]);
        for (int odd = 2; odd >= 0; odd -= 2)
            sum[i] = emulated_fma(emulated_bf16(of_x + 4 * i + odd), emulated_bf16(of_w + 4 * i + odd), sum[i]);
    }
    memcpy(&sums, sum, sizeof sum);
    return sums;
}
#undef _mm512_dpbf16_ps
#define _mm512_dpbf16_ps(sums, x, w) ((__m512)emulated_dpbf16((__m512i)(sums), (__m512i)(x), (__m512i)(w)))

#undef EACH
#endif
