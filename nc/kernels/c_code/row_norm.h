/* Layer norm and RMS norm of a row of fp32, with 256-bit registers; FOR_AVX2 is defined where this is
 * included. Sums are those of 16 lanes. What is no number makes the whole row no number. */

#define NORM_INLINE static inline __attribute__((always_inline)) FOR_AVX2

NORM_INLINE double sum_of_lanes(__m256 a, __m256 b)
{
    float lanes[8];
    double sum = 0;
    _mm256_storeu_ps(lanes, _mm256_add_ps(a, b));
    for (int i = 0; i < 8; i++)
        sum += lanes[i];
    return sum;
}

/* The sum of n numbers, or with a mean that is taken off, of the squares of what is left. */
NORM_INLINE double sum_of_row(const float *x, int64_t n, float mean, const int squares)
{
    const __m256 middle = _mm256_set1_ps(mean);
    __m256 sums[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
    double rest = 0;
    int64_t i = 0;
    for (; i + 16 <= n; i += 16)
        for (int half = 0; half < 2; half++) {
            __m256 v = _mm256_loadu_ps(x + i + 8 * half);
            if (squares) {
                v = _mm256_sub_ps(v, middle);
                sums[half] = _mm256_fmadd_ps(v, v, sums[half]);
            } else
                sums[half] = _mm256_add_ps(sums[half], v);
        }
    for (; i < n; i++) {
        const double v = squares ? x[i] - mean : x[i];
        rest += squares ? v * v : v;
    }
    return sum_of_lanes(sums[0], sums[1]) + rest;
}

/* y = (x - mean) / sqrt(variance + epsilon) * weight + bias, of n numbers; an RMS norm has mean 0. x and y may
 * be the same. */
FOR_AVX2 static void norm_row(const float *x, const float *weight, const float *bias, float *y, int64_t n,
    double epsilon, int64_t centred)
{
    const float mean = centred ? (float)(sum_of_row(x, n, 0, 0) / (double)n) : 0;
    const float factor = (float)(1 / sqrt(sum_of_row(x, n, mean, 1) / (double)n + epsilon));
    const __m256 middle = _mm256_set1_ps(mean), by = _mm256_set1_ps(factor);
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        const __m256 v = _mm256_mul_ps(_mm256_sub_ps(_mm256_loadu_ps(x + i), middle), by);
        _mm256_storeu_ps(y + i, _mm256_fmadd_ps(v, _mm256_loadu_ps(weight + i), _mm256_loadu_ps(bias + i)));
    }
    for (; i < n; i++)
        y[i] = (x[i] - mean) * factor * weight[i] + bias[i];
}
