/* Sums of products of codes, for one instruction set: NAMED, FOR_THIS, INTEGERS, OF_INTEGERS, LOADED and
 * ADD_PRODUCTS are defined where this is included, and BLOCKS_AT_ONCE by NAMED: blocks of outputs whose sums are
 * in registers. */

/* Sums of `rows` rows of codes, `groups` of 4 bytes that are `stride` apart, with `blocks` blocks of outputs that
 * are `block` bytes apart. */
INLINE FOR_THIS void NAMED(multiply)(const int rows, const int blocks, const void *x, int64_t stride,
    const void *w, int64_t block, int64_t groups, INTEGERS (*sums)[NAMED(BLOCKS_AT_ONCE)])
{
    const char *const lefts = x, *const rights = w;
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < blocks; c++)
            sums[r][c] = OF_INTEGERS(set1)(0);
    for (int64_t t = 0; t < groups; t++) {
        INTEGERS right[NAMED(BLOCKS_AT_ONCE)];
        for (int c = 0; c < blocks; c++)
            right[c] = LOADED(rights + c * block + t * (int64_t)sizeof(INTEGERS));
        for (int r = 0; r < rows; r++) {
            int32_t group;
            memcpy(&group, lefts + r * stride + t * 4, 4);
            const INTEGERS left = OF_INTEGERS(set1)(group);
            for (int c = 0; c < blocks; c++)
                ADD_PRODUCTS(sums[r][c], left, right[c]);
        }
    }
}
