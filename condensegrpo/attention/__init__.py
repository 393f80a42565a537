"""What a model looks at: attention captured from queries and keys, and made into a score a unit of the history."""
