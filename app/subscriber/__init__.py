"""The parts of the subscriber role: chunk cache, targets, two-phase driving of receivers, one task per receiver."""
