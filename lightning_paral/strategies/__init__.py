"""The strategies, one file each. Sections of each: process group, model wrapping, sampler injection, checkpoint."""
