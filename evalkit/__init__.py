"""Parts of the evaluator that eval.py imports only when it needs them.

worker   runs the submission (a script of its own)
person   what a person sees
audit    is the submission honest?
inputs   adversarial inputs for the audit
lint     the contest's rules for the uploaded file
"""
