/* GELU with AVX-512; FOR_AVX512 is defined where this is included. */

#include <immintrin.h>

/* max(x, 0) - |x| * tail(|x|). The tail is a polynomial around the nearest of 16 even points, whose
 * coefficients are read from registers (gelu.py): it is right within 2e-8 * |x|. */
static inline __attribute__((always_inline)) FOR_AVX512 __m512 gelu_of_16(
    __m512 x, const float (*table)[GELU_PIECES])
{
    /* the last piece holds from here on */
    const __m512 a = _mm512_min_ps(_mm512_set1_ps(15.4f * GELU_STEP), _mm512_abs_ps(x));
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(a, _mm512_set1_ps(1 / GELU_STEP)), _MM_FROUND_NO_EXC);
    const __m512i piece = _mm512_cvtps_epi32(n);
    const __m512 t = _mm512_fnmadd_ps(n, _mm512_set1_ps(GELU_STEP), a);
    __m512 p = _mm512_permutexvar_ps(piece, _mm512_loadu_ps(table[0]));
    for (int i = 1; i <= GELU_DEGREE; i++)
        p = _mm512_fmadd_ps(p, t, _mm512_permutexvar_ps(piece, _mm512_loadu_ps(table[i])));
    return _mm512_fnmadd_ps(a, p, _mm512_max_ps(_mm512_setzero_ps(), x)); /* what is no number stays so */
}
