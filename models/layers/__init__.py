"""The parts that decoders are put together from."""
