"""A checkpoint's tokenizer and the way back: loading it, bounding its time, reading texts aside where nothing bounds
it, and text from tokens as they come. The next kind of tokenizer file goes here.
"""
