/* The activation is chosen once, not for each number. */
#define BY_ACTIVATION(op, WORK)                                                  \
    switch (op) {                                                                \
    case ACTIVATION_IDENTITY: WORK(ACTIVATION_IDENTITY); break;                  \
    case ACTIVATION_RELU: WORK(ACTIVATION_RELU); break;                          \
    case ACTIVATION_LEAKY_RELU: WORK(ACTIVATION_LEAKY_RELU); break;              \
    case ACTIVATION_CLIP: WORK(ACTIVATION_CLIP); break;                          \
    case ACTIVATION_HARDSWISH: WORK(ACTIVATION_HARDSWISH); break;                \
    case ACTIVATION_SWISH: WORK(ACTIVATION_SWISH); break;                        \
    case ACTIVATION_GELU_TANH: WORK(ACTIVATION_GELU_TANH); break;                \
    case ACTIVATION_GELU_ERF: WORK(ACTIVATION_GELU_ERF); break;                  \
    }
