/* What attentions with AVX-512 share; FOR_AVX512 is defined where this is included. */

#define INLINE static inline __attribute__((always_inline))

INLINE int64_t up(int64_t n, int64_t to)
{
    return (n + to - 1) / to * to;
}

/* Which of 16 numbers there are where `left` are left. */
INLINE FOR_AVX512 __mmask16 lanes_of(int64_t left)
{
    return (__mmask16)(left >= 16 ? 0xffff : left > 0 ? (1 << left) - 1 : 0);
}

/* 16 scores of a row with a mask, MASK_..., from `key` on, of which `left` keys are seen; -INFINITY where a key
 * is not. `step`: from key to key of the mask, 0 or 1. */
INLINE FOR_AVX512 __m512 masked(int64_t kind, const char *mask, int64_t step, int64_t key, int64_t left,
    __m512 x)
{
    const __mmask16 lanes = lanes_of(left);
    const __m512 unseen = _mm512_set1_ps(-INFINITY);
    if (kind == MASK_FLOAT) {
        const float *added = (const float *)mask + key * step;
        x = _mm512_add_ps(x, step ? _mm512_maskz_loadu_ps(lanes, added) : _mm512_set1_ps(*added));
    } else if (kind == MASK_BOOL) {
        const uint8_t *shown = (const uint8_t *)mask + key * step;
        const __m128i some = step ? _mm_maskz_loadu_epi8(lanes, shown) : _mm_set1_epi8((char)*shown);
        return _mm512_mask_mov_ps(unseen, lanes & _mm_test_epi8_mask(some, some), x);
    }
    return _mm512_mask_mov_ps(unseen, lanes, x);
}
