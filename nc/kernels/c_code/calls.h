/* Functions of the form of dnnl_primitive_execute: (numbers, not used, count of tensors, their addresses). The first number is how many
 * follow. Each function checks what it is given: a caller that counts otherwise gets an error, and no address is computed from its numbers.
 */

#include <stdint.h>

/* What functions return; nc.kernels.c_code.failures has the words. */
enum { OK, OTHER_INDEX, NO_MEMORY, NOT_HERE, OTHER_NUMBERS, OTHER_TENSORS, OTHER_DTYPE, OTHER_SIZE, OTHER_OPERATION };

#define EXPECT(condition, error) \
    do {                         \
        if (!(condition))        \
            return error;        \
    } while (0)

/* Begins a function: `how` is what follows the count. */
#define TAKES(numbers, least, most)                               \
    how++;                                                        \
    EXPECT(how[-1] == (numbers), OTHER_NUMBERS);                  \
    EXPECT((least) <= count && count <= (most), OTHER_TENSORS)
