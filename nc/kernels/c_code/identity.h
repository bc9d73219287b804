/* What each library says of itself. flags.py includes this file in front of every source, and defines
 * NC_SOURCE_HASH. */

#include <stdint.h>

/* Of the source, the headers, and the flags. */
const char *nc_source_hash(void) { return NC_SOURCE_HASH; }

const char *nc_compiler(void)
{
#ifdef __clang__
    return "clang " __clang_version__;
#else
    return "gcc " __VERSION__;
#endif
}

/* Instruction sets that this library has code for: bit i for number i. It needs no CPU that has them: it
 * asks, or its callers do. */
int64_t nc_isas(void);
/* Those that it would have code for if its compiler knew them all; see CODE_FOR in isa.h. */
int64_t nc_written_for(void);

/* Those that the user leaves it, set once before the first call of anything else, and what follows: those
 * that it may use. */
static int64_t nc_permitted = -1;
void nc_permit(int64_t isas) { nc_permitted = isas; }
int64_t nc_may_use(void) { return nc_isas() & nc_permitted; }
