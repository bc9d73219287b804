/* Activations behind a product, eight numbers at once. Functions for larger instruction sets take them in. */

#include <immintrin.h>
#include <stdint.h>

#define AVX2 __attribute__((target("avx2,fma")))
#define INLINE static inline __attribute__((always_inline)) AVX2

/* e^x, for x that is limited to +-87: x = n ln 2 + r, and a polynomial for e^r (the coefficients of Cephes,
 * S. Moshier). */
INLINE __m256 exponential(__m256 x)
{
    x = _mm256_max_ps(_mm256_min_ps(x, _mm256_set1_ps(87.0f)), _mm256_set1_ps(-87.0f));
    const __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504088896341f)),
        _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), x), p = _mm256_set1_ps(1.9875691500e-4f);
    r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), r);
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.3981999507e-3f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(8.3334519073e-3f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(4.1665795894e-2f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.6666665459e-1f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(5.0000001201e-1f));
    p = _mm256_add_ps(_mm256_fmadd_ps(_mm256_mul_ps(p, r), r, r), _mm256_set1_ps(1.0f));
    const __m256i power =
        _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(p, _mm256_castsi256_ps(power));
}

/* x / (1 + e^-z) */
INLINE __m256 gated(__m256 x, __m256 z)
{
    const __m256 one = _mm256_set1_ps(1.0f);
    return _mm256_div_ps(x, _mm256_add_ps(one, exponential(_mm256_sub_ps(_mm256_setzero_ps(), z))));
}

/* The error function within 1.5e-7 (Abramowitz and Stegun, 7.1.26). */
INLINE __m256 error_function(__m256 x)
{
    const __m256 sign = _mm256_set1_ps(-0.0f), one = _mm256_set1_ps(1.0f), size = _mm256_andnot_ps(sign, x);
    const __m256 t = _mm256_div_ps(one, _mm256_fmadd_ps(size, _mm256_set1_ps(0.3275911f), one));
    __m256 p = _mm256_set1_ps(1.061405429f);
    p = _mm256_fmadd_ps(p, t, _mm256_set1_ps(-1.453152027f));
    p = _mm256_fmadd_ps(p, t, _mm256_set1_ps(1.421413741f));
    p = _mm256_fmadd_ps(p, t, _mm256_set1_ps(-0.284496736f));
    p = _mm256_mul_ps(_mm256_fmadd_ps(p, t, _mm256_set1_ps(0.254829592f)), t);
    p = _mm256_fnmadd_ps(p, exponential(_mm256_sub_ps(_mm256_setzero_ps(), _mm256_mul_ps(size, size))), one);
    return _mm256_or_ps(p, _mm256_and_ps(sign, x));
}

INLINE __m256 activation(const int64_t op, __m256 v, float alpha, float beta)
{
    const __m256 zero = _mm256_setzero_ps(), a = _mm256_set1_ps(alpha), b = _mm256_set1_ps(beta),
        one = _mm256_set1_ps(1.0f);
    switch (op) {
    case ACTIVATION_RELU: return _mm256_max_ps(v, zero);
    case ACTIVATION_LEAKY_RELU:
        return _mm256_blendv_ps(v, _mm256_mul_ps(v, a), _mm256_cmp_ps(v, zero, _CMP_LE_OS));
    case ACTIVATION_CLIP: return _mm256_min_ps(_mm256_max_ps(v, a), b);
    case ACTIVATION_HARDSWISH:
        return _mm256_mul_ps(v, _mm256_min_ps(_mm256_max_ps(_mm256_fmadd_ps(v, a, b), zero), one));
    case ACTIVATION_SWISH: return gated(v, _mm256_mul_ps(v, a));
    case ACTIVATION_GELU_TANH: {
        const __m256 cubic =
            _mm256_fmadd_ps(_mm256_mul_ps(_mm256_set1_ps(0.044715f), _mm256_mul_ps(v, v)), v, v);
        return gated(v, _mm256_mul_ps(_mm256_set1_ps(1.5957691216057308f), cubic));
    }
    case ACTIVATION_GELU_ERF: {
        const __m256 half = _mm256_mul_ps(_mm256_set1_ps(0.5f), v);
        return _mm256_fmadd_ps(half, error_function(_mm256_mul_ps(v, _mm256_set1_ps(0.70710678118654752f))),
            half);
    }
    default: return v;
    }
}
