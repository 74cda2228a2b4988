"""Comparisons with transformers and with other engines: the matrix of families and heads, endpoints, folders.

reference        transformers' models; the only file that imports transformers
matrix           families by heads by checks
endpoint_checks  an endpoint compared with the model it serves
verifying        the checksums of a folder or file of answers
onnx_session     an ONNX file, run
"""
