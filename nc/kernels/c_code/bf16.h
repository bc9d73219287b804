/* Rounding to bf16 with AVX-512; FOR_AVX512 is defined where this is included. */

#include <immintrin.h>

/* The nearest numbers of bf16, as fp32: ties go to even, and what is no number stays so. */
static inline __attribute__((always_inline)) FOR_AVX512 __m512i rounded_to_bf16(__m512 x)
{
    const __m512i bits = _mm512_castps_si512(x), one = _mm512_set1_epi32(1);
    const __m512i even = _mm512_and_si512(_mm512_srli_epi32(bits, 16), one);
    const __m512i near = _mm512_add_epi32(bits, _mm512_add_epi32(even, _mm512_set1_epi32(0x7fff)));
    const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
    const __m512i all = _mm512_mask_mov_epi32(near, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), quiet);
    return _mm512_and_si512(all, _mm512_set1_epi32((int)0xffff0000));
}

static inline __attribute__((always_inline)) FOR_AVX512 __m512 near_bf16(__m512 x)
{
    return _mm512_castsi512_ps(rounded_to_bf16(x));
}
