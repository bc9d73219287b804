/* e^x with AVX-512; FOR_AVX512 is defined where this is included. */

#include <immintrin.h>

/* e^x for x <= 0, a polynomial as in steps.c; what is no number stays so. */
static inline __attribute__((always_inline)) FOR_AVX512 __m512 exponential_of_16(__m512 x)
{
    const __m512 limited = _mm512_max_ps(_mm512_set1_ps(-87.0f), x);
    const __m512 n =
        _mm512_roundscale_ps(_mm512_mul_ps(limited, _mm512_set1_ps(1.44269504088896341f)), _MM_FROUND_NO_EXC);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), limited),
        p = _mm512_set1_ps(1.9875691500e-4f);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
    p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
    return _mm512_scalef_ps(p, n);
}
