"""Two recordings or results of one kind side by side: a step before and after, and what explains the change."""
