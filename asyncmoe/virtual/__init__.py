"""The virtual world: the live engine on a clock that jumps, over modelled devices and links."""
