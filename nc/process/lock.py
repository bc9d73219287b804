"""The lock for settings of the whole process.

They are warning filters, standard streams, export's switches, and a model's training flags.

Python keeps none of these per thread. Whoever changes one for a while holds the lock until it is put back,
and it is one lock, since two that interleave would put back each other's changes.
"""

from __future__ import annotations

import threading

LOCK = threading.RLock()
