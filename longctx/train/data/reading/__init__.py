"""Files and datasets become checked records: texts, conversations, groups of answers."""
