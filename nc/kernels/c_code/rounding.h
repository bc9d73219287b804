/* Ranges that are found in each call and the codes of what lies in them, as nc.numerics.affine gives them.
 * FOR_AVX512 or FOR_AVX2 is defined where this is included, for registers of 512 or of 256 bits. */

#define TINY_AMAX 0x1p-100 /* as in nc.numerics.affine */
/* Distance of a quotient from half a code below which its rounding is not sure. */
#define SURE 0.4999f

/* The least and the largest of some numbers and 0; both are no number where one of them is none. */
struct range {
    float least, most;
};

struct qparams {
    float scale;
    int32_t zero_point;
};

/* The range of what two ranges are of. */
static inline struct range joined(struct range a, struct range b)
{
    if (a.least != a.least || b.least != b.least)
        return (struct range){NAN, NAN};
    return (struct range){b.least < a.least ? b.least : a.least, b.most > a.most ? b.most : a.most};
}

/* Scale and zero point of a range of uint8. With an infinite number, or with what is none, the scale is no
 * number. */
static inline struct qparams qparams_of(struct range range, int64_t symmetric)
{
    const double least = range.least, most = range.most, amax = -least > most ? -least : most;
    double step = symmetric ? amax / 127 : (most - least) / 255, zero = symmetric ? 128 : 0;
    if (amax < TINY_AMAX)
        step = 1;
    else if (!symmetric && isfinite(step))
        zero = fmin(fmax(-rint(least / step), 0), 255);
    return (struct qparams){isfinite(amax) ? (float)step : NAN, (int32_t)zero};
}

/* The codes of some numbers: round(x / scale) + zero point, from 0 to 255. x * inverse is x / scale but for
 * some units of the last place, which matter only near half a code: there it is divided. What is no number
 * becomes 0. */
#ifdef FOR_AVX512
static inline __attribute__((always_inline)) FOR_AVX512 __m512i codes_of_16(__m512 x, __m512 scale,
    __m512 inverse, __m512 zero_point)
{
    enum { NEAREST = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC };
    __m512 v = _mm512_mul_ps(x, inverse), n = _mm512_roundscale_ps(v, NEAREST);
    if (_mm512_cmp_ps_mask(_mm512_abs_ps(_mm512_sub_ps(v, n)), _mm512_set1_ps(SURE), _CMP_NLT_UQ))
        n = _mm512_roundscale_ps(_mm512_div_ps(x, scale), NEAREST);
    v = _mm512_max_ps(_mm512_add_ps(n, zero_point), _mm512_setzero_ps());
    return _mm512_cvtps_epi32(_mm512_min_ps(v, _mm512_set1_ps(255.0f)));
}
#endif
#ifdef FOR_AVX2
static inline __attribute__((always_inline)) FOR_AVX2 __m256i codes_of_8(__m256 x, __m256 scale, __m256 inverse,
    __m256 zero_point)
{
    enum { NEAREST = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC };
    __m256 v = _mm256_mul_ps(x, inverse), n = _mm256_round_ps(v, NEAREST);
    const __m256 away = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), _mm256_sub_ps(v, n));
    if (_mm256_movemask_ps(_mm256_cmp_ps(away, _mm256_set1_ps(SURE), _CMP_NLT_UQ)))
        n = _mm256_round_ps(_mm256_div_ps(x, scale), NEAREST);
    v = _mm256_max_ps(_mm256_add_ps(n, zero_point), _mm256_setzero_ps());
    return _mm256_cvtps_epi32(_mm256_min_ps(v, _mm256_set1_ps(255.0f)));
}
#endif
