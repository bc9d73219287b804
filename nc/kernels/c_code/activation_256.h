/* Activations with 256-bit registers; FOR_AVX2 and the tables of gelu.py, `of_erf` and `of_tanh`, are defined
 * where this is included. What is no number stays so. */

#include "exponential_256.h"
#define ACTIVATION_INLINE static inline __attribute__((always_inline)) FOR_AVX2

ACTIVATION_INLINE __m256 nearest_of_8(__m256 x)
{
    return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

/* One row of a table of gelu.py, for each lane the number of its piece. */
ACTIVATION_INLINE __m256 of_piece(const float *row, __m256i piece)
{
    const __m256 lower = _mm256_permutevar8x32_ps(_mm256_loadu_ps(row), piece),
                 upper = _mm256_permutevar8x32_ps(_mm256_loadu_ps(row + 8), piece);
    return _mm256_blendv_ps(lower, upper, _mm256_castsi256_ps(_mm256_slli_epi32(piece, 28)));
}

/* As gelu_of_16. */
ACTIVATION_INLINE __m256 gelu_of_8(__m256 x, const float (*table)[GELU_PIECES])
{
    const __m256 size = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x),
                 a = _mm256_min_ps(_mm256_set1_ps(15.4f * GELU_STEP), size);
    const __m256 n = nearest_of_8(_mm256_mul_ps(a, _mm256_set1_ps(1 / GELU_STEP)));
    const __m256i piece = _mm256_cvtps_epi32(n);
    const __m256 t = _mm256_fnmadd_ps(n, _mm256_set1_ps(GELU_STEP), a);
    __m256 p = of_piece(table[0], piece);
    for (int i = 1; i <= GELU_DEGREE; i++)
        p = _mm256_fmadd_ps(p, t, of_piece(table[i], piece));
    return _mm256_fnmadd_ps(a, p, _mm256_max_ps(_mm256_setzero_ps(), x)); /* what is no number stays so */
}

ACTIVATION_INLINE __m256 activation_of_8(const int64_t op, __m256 v, float alpha, float beta)
{
    const __m256 zero = _mm256_setzero_ps(), a = _mm256_set1_ps(alpha), b = _mm256_set1_ps(beta);
    switch (op) {
    case ACTIVATION_RELU: return _mm256_max_ps(zero, v); /* what is no number stays so */
    case ACTIVATION_LEAKY_RELU:
        return _mm256_blendv_ps(v, _mm256_mul_ps(v, a), _mm256_cmp_ps(v, zero, _CMP_LE_OS));
    case ACTIVATION_CLIP: return _mm256_min_ps(b, _mm256_max_ps(a, v));
    case ACTIVATION_HARDSWISH:
        return _mm256_mul_ps(v,
            _mm256_min_ps(_mm256_set1_ps(1.0f), _mm256_max_ps(zero, _mm256_fmadd_ps(v, a, b))));
    case ACTIVATION_SWISH: return gated_8(v, _mm256_mul_ps(v, a));
    case ACTIVATION_GELU_TANH: return gelu_of_8(v, of_tanh);
    case ACTIVATION_GELU_ERF: return gelu_of_8(v, of_erf);
    default: return v;
    }
}
