"""Have a program fork the processes that it would spawn: `tests.support.zygote.forking` puts this on its path.

The program itself starts as ever. On CPU vLLM spawns its processes, and each imports all of vLLM again: a server of
three takes a third of the time without that.
"""

from tests.support.zygote import fork_instead_of_spawn

fork_instead_of_spawn()
