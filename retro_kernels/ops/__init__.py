"""The public ops, one a file: signature, docstring, schema, fake. Start reading here.

A call goes  ops/<op>.py -> _validate.py -> _eager.py or _register.py -> _dispatch.py -> <backend>/<op>.py  and the
gradient comes back through the operator `<op>_backward`, from the last three.
"""
