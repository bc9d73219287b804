/* 16 x 16 numbers of 32 bits with AVX-512; FOR_AVX512 is defined where this is included. */

#include <immintrin.h>

#define UNROLL_16 _Pragma("GCC unroll 16")

/* 16 x 16 numbers, rows of which become columns. */
static inline __attribute__((always_inline)) FOR_AVX512 void transpose(__m512 x[16])
{
    __m512 y[16];
    UNROLL_16 for (int i = 0; i < 16; i += 2)
    {
        y[i] = _mm512_unpacklo_ps(x[i], x[i + 1]);
        y[i + 1] = _mm512_unpackhi_ps(x[i], x[i + 1]);
    }
    UNROLL_16 for (int i = 0; i < 16; i += 4)
    {
        for (int j = 0; j < 2; j++) {
            const __m512d up = _mm512_castps_pd(y[i + j]), down = _mm512_castps_pd(y[i + j + 2]);
            x[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(up, down));
            x[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(up, down));
        }
    }
    /* x[4 i + j] has the columns j, 4 + j, 8 + j and 12 + j of rows 4 i to 4 i + 3 */
    UNROLL_16 for (int j = 0; j < 4; j++)
    {
        const __m512 first = _mm512_shuffle_f32x4(x[j], x[4 + j], 0x88),
                     odd = _mm512_shuffle_f32x4(x[j], x[4 + j], 0xdd);
        const __m512 last = _mm512_shuffle_f32x4(x[8 + j], x[12 + j], 0x88),
                     last_odd = _mm512_shuffle_f32x4(x[8 + j], x[12 + j], 0xdd);
        y[j] = _mm512_shuffle_f32x4(first, last, 0x88);
        y[8 + j] = _mm512_shuffle_f32x4(first, last, 0xdd);
        y[4 + j] = _mm512_shuffle_f32x4(odd, last_odd, 0x88);
        y[12 + j] = _mm512_shuffle_f32x4(odd, last_odd, 0xdd);
    }
    UNROLL_16 for (int i = 0; i < 16; i++)
        x[i] = y[i];
}
