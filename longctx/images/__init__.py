"""Images of vision-language models: the tokens that stand for them, and the tower that sees
them."""
