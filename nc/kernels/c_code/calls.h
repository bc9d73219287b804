/* Functions of the table in abi.py: (structure, not used, count of tensors, their addresses). Each one checks
 * what it is given, and no address is computed from its numbers before that.
 */

#include <stdint.h>

#define EXPECT(condition, error) \
    do {                         \
        if (!(condition))        \
            return error;        \
    } while (0)

/* Begins the function of this name. */
#define TAKES(function)                                                                  \
    (void)unused;                                                                        \
    EXPECT(how->size == (int64_t)sizeof *how, OTHER_NUMBERS);                            \
    EXPECT(count >= function##_least && count <= function##_most, OTHER_TENSORS)

/* Memory of a list whose address is known at each call only: see runner.c. */
int nc_set(void *place, void *address)
{
    *(void **)place = address;
    return 0;
}
