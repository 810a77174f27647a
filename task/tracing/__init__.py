"""What `task.trace` is made of: labels, rules per operation, groups, proof."""
