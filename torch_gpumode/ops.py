"""Defines torch.ops.gpumode, ops that torch.compile and torch.export take as they are.

An optimizer of torch_gpumode.optim uses them in its step while that is traced, and needs no import
of this.

One op for each rule, which updates lists of tensors in place: adam_ (also AdamW), sgd_, adagrad_,
rmsprop_, lion_, lamb_, novograd_. torch_gpumode.optim.naive says what each computes, and

    torch.ops.gpumode.adam_(params, grads, states, masters, steps, scalars, hyper, groups, *,
                            numbers=None, present=None, master=None, stochastic=False, seed=0,
                            grad_scale=None, found_inf=None, grad_sum=None, max_norm=None)

    params: of float32, bfloat16, float16 or float64. Computed in float64 where it is of that, else
        in float32.
    grads: one for each of params, of its shape, and any of these dtypes.
    states: of the shape of their parameter, float32, bfloat16, float16 or float64. Those of the
        first parameter, in the order below, then those of the next: as many for each, the first
        of the rule's, or as `present` says.
    masters: with master="fp32" one float32 for each of params that is bfloat16 or float16; with
        master="remainder16" one int16 for each that is bfloat16.
    steps: one number for each of params, float32: how many steps it has made. It is added to.
    scalars: novograd_: one number for each of params, float32: the average of the gradient's
        squared norm. Others: empty.
    hyper: [num_groups, at least as many as below], float64: the hyper-parameters of each group;
        flags are 0 or 1.
    groups: for each of params, its row of `hyper`.
    numbers: for each of params, its number in the optimizer, on which the random bits of stochastic
        rounding depend; None: its place in the list.
    present: for each of params, the sum of 2**k over the states k that it has.
    master: where the exact value of a parameter in half precision is: None, nowhere else.
    stochastic: whether what is stored as bfloat16 is rounded by chance, from `seed`, 64 bits.
    grad_scale: what gradients are divided by first, one number.
    found_inf: one number: if it is not 0, nothing is changed.
    grad_sum: one number: the squared norm of all gradients, after that. With max_norm gradients are
        multiplied by max_norm / (sqrt(grad_sum) + 1e-6), if that is less than 1.

    op         states                              columns of hyper
    adam_      exp_avg, exp_avg_sq, max_exp_avg_sq lr, beta1, beta2, eps, weight_decay, amsgrad,
                                                   maximize, decoupled
    sgd_       momentum_buffer                     lr, momentum, dampening, weight_decay, nesterov,
                                                   maximize
    adagrad_   sum                                 lr, lr_decay, eps, weight_decay, maximize
    rmsprop_   square_avg, momentum_buffer,        lr, alpha, eps, weight_decay, momentum, centered,
               grad_avg                            maximize
    lion_      exp_avg                             lr, beta1, beta2, weight_decay, maximize
    lamb_      exp_avg, exp_avg_sq                 lr, beta1, beta2, eps, weight_decay,
                                                   bias_correction, grad_averaging, decoupled,
                                                   always_adapts, maximize
    novograd_  exp_avg                             lr, beta1, beta2, eps, weight_decay,
                                                   bias_correction, grad_averaging, inside_moment,
                                                   init_zero, maximize

And

    torch.ops.gpumode.grad_sum(grads, grad_scale=None) -> Tensor

    the squared norm of all gradients as one vector, after they were divided by `grad_scale`: one
    number of float64.

All tensors are on cpu. They have no derivative: call them under torch.no_grad().

Raises (and nothing was changed):
    ValueError: the lengths of lists do not fit each other, or a number is none, or out of range.
    RuntimeError: a gradient, state or master has another shape, dtype or device than its parameter
        allows.
"""

from torch_gpumode import _extension

_extension.load()
