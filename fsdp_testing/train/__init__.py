"""Does a training script, a function or a model compute on N ranks what it computes in one process?"""
