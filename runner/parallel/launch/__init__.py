"""How the processes of a run are started, joined and watched."""
