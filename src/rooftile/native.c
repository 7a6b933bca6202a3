// The part of a call that is too slow in Python: finding a prepared call by its arguments, and launching a kernel.
//
// native.py builds this file as Triton builds its launchers. Nothing here knows PyTorch's headers: tensors are asked
// through their Python methods. The CUDA driver is opened at run time, so that the module loads without a GPU.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <dlfcn.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "cuda.h"

#define MAX_ARGS 64   // of a launch or of an op
#define MAX_PARAMS 96 // of a kernel, constants not counted
#define MAX_MAPS 8    // TMA descriptors of a kernel
#define MAX_KEY 4096  // bytes of a call's key

// ---------------------------------------------------------------------------------------------------------------------
// The driver

static struct {
  CUresult (*launch)(const CUlaunchConfig *, CUfunction, void **, void **);
  CUresult (*encode)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *, const cuuint64_t *,
                     const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                     CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
  CUresult (*device)(CUdevice *);
  CUresult (*retain)(CUcontext *, CUdevice);
  CUresult (*set_context)(CUcontext);
  CUresult (*error)(CUresult, const char **);
} driver;

static const struct {
  const char *name;
  void **function;
} driver_functions[] = {
    {"cuLaunchKernelEx", (void **)&driver.launch},
    {"cuTensorMapEncodeTiled", (void **)&driver.encode},
    {"cuCtxGetDevice", (void **)&driver.device},
    {"cuDevicePrimaryCtxRetain", (void **)&driver.retain},
    {"cuCtxSetCurrent", (void **)&driver.set_context},
    {"cuGetErrorString", (void **)&driver.error},
};
#define N_FUNCTIONS (sizeof(driver_functions) / sizeof(driver_functions[0]))

static PyObject *raise_driver_error(const char *what, CUresult code) {
  const char *text = NULL;
  if (driver.error)
    driver.error(code, &text);
  return PyErr_Format(PyExc_RuntimeError, "Triton Error [CUDA]: %s (%s: %d)", text ? text : "unknown error", what, code);
}

// Whether that device is the current one. A thread that has asked CUDA for nothing so far is on device 0 without a
// context, and gets PyTorch's.
static bool is_current(int wanted) {
  CUdevice device;
  CUcontext context;
  if (driver.device(&device) == CUDA_SUCCESS)
    return device == wanted;
  return wanted == 0 && driver.retain(&context, 0) == CUDA_SUCCESS && driver.set_context(context) == CUDA_SUCCESS;
}

// use_driver(functions): the driver's functions, {name: address}; libcuda's own where it is None.
static PyObject *use_driver(PyObject *module, PyObject *functions) {
  void *library = NULL;
  if (functions == Py_None) {
    library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library)
      return PyErr_Format(PyExc_OSError, "libcuda.so.1 can't be opened: %s", dlerror());
  }
  for (size_t i = 0; i < N_FUNCTIONS; i++) {
    void *found = NULL;
    if (library) {
      found = dlsym(library, driver_functions[i].name);
    } else {
      PyObject *address = PyDict_GetItemString(functions, driver_functions[i].name);
      found = address ? PyLong_AsVoidPtr(address) : NULL;
      if (PyErr_Occurred())
        return NULL;
    }
    if (!found)
      return PyErr_Format(PyExc_OSError, "the CUDA driver has no %s", driver_functions[i].name);
    *driver_functions[i].function = found;
  }
  Py_RETURN_NONE;
}

// ---------------------------------------------------------------------------------------------------------------------
// What tensors are asked

static PyObject *name_data_ptr, *name_shape, *name_stride, *name_dtype, *name_get_device, *name_is_neg,
    *name_requires_grad, *name_calls, *name_enter, *name_exit;

static bool call_method_int(PyObject *self, PyObject *name, long long *value) {
  PyObject *result = PyObject_CallMethodNoArgs(self, name);
  if (!result)
    return false;
  *value = (long long)PyLong_AsUnsignedLongLongMask(result);
  Py_DECREF(result);
  return !PyErr_Occurred();
}

// ---------------------------------------------------------------------------------------------------------------------
// Launch: a compiled kernel, and how its parameters are made of a call's arguments

static PyObject *hooks;     // triton.knobs.runtime
static int observed;        // how many want to see every launch from Python
static PyObject *stream_of; // the current stream of a device

enum { POINTER, FIXED, NUMBER, MAP };

typedef struct {
  CUtensorMapDataType type;
  CUtensorMapSwizzle swizzle;
  CUtensorMapFloatOOBfill fill;
  cuuint32_t rank, box[5];
  cuuint64_t dims[5], strides[5];
} MapSpec;

typedef struct {
  _Alignas(64) CUtensorMap map;
  unsigned long long address;
} EncodedMap;

typedef struct {
  int kind;
  int index;     // the call's argument; of FIXED: the offset of its bytes
  int size;      // NUMBER: 4 or 8 bytes
  bool aligned;  // POINTER: what was compiled wants 16 bytes
  int map;       // MAP: its place among the maps
} Param;

typedef struct {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  PyObject *weakrefs;
  PyObject *slow;
  PyObject *index; // the device's
  bool bound;
  int device, n_args, n_params, n_maps;
  int programs; // -1: the call's last argument
  unsigned threads, shared;
  int num_ctas, cooperative, pdl;
  CUfunction function;
  PyObject *fixed; // bytes
  bool none[MAX_ARGS]; // arguments for which the kernel was compiled without a tensor
  Param params[MAX_PARAMS];
  MapSpec specs[MAX_MAPS];
  EncodedMap *maps;
} Launch;

// Whether a profiler has hooked into launches: they are then made through Triton's own path.
static int hooked(void) {
  PyObject *names[] = {name_enter, name_exit};
  for (int i = 0; i < 2 && hooks; i++) {
    PyObject *hook = PyObject_GetAttr(hooks, names[i]);
    if (!hook)
      return -1;
    int found = hook != Py_None;
    if (found) {
      PyObject *calls = PyObject_GetAttr(hook, name_calls);
      if (calls) {
        found = PyObject_IsTrue(calls);
        Py_DECREF(calls);
      } else {
        PyErr_Clear();
      }
    }
    Py_DECREF(hook);
    if (found)
      return found;
  }
  return 0;
}

static CUresult encode(CUtensorMap *map, const MapSpec *s, unsigned long long address) {
  static const cuuint32_t ones[5] = {1, 1, 1, 1, 1};
  return driver.encode(map, s->type, s->rank, (void *)address, s->dims, s->strides, s->box, ones,
                       CU_TENSOR_MAP_INTERLEAVE_NONE, s->swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, s->fill);
}

static PyObject *launch_call(PyObject *callable, PyObject *const *args, size_t nargsf, PyObject *names) {
  Launch *self = (Launch *)callable;
  Py_ssize_t n = PyVectorcall_NARGS(nargsf);
  if (names && PyTuple_GET_SIZE(names)) {
    PyErr_SetString(PyExc_TypeError, "a launch takes no keyword arguments");
    return NULL;
  }
  if (!self->bound || n != self->n_args || observed)
    goto slow;
  int listening = hooked();
  if (listening < 0)
    return NULL;
  if (listening || !is_current(self->device))
    goto slow;

  uint64_t values[MAX_PARAMS];
  void *pointers[MAX_PARAMS + 2];
  _Alignas(64) CUtensorMap maps[MAX_MAPS];
  const char *fixed = PyBytes_AS_STRING(self->fixed);
  for (Py_ssize_t i = 0; i < n; i++)
    if (i < MAX_ARGS && self->none[i] && args[i] != Py_None)
      goto slow;
  for (int i = 0; i < self->n_params; i++) {
    const Param *p = &self->params[i];
    pointers[i] = &values[i];
    if (p->kind == FIXED) {
      pointers[i] = (void *)(fixed + p->index);
    } else if (p->kind == NUMBER) {
      long long value = PyLong_AsLongLong(args[p->index]);
      if (value == -1 && PyErr_Occurred()) { // no integer, or one that is too large
        PyErr_Clear();
        goto slow;
      }
      if (p->size == 4 && value != (int32_t)value)
        goto slow;
      values[i] = (uint64_t)value;
    } else {
      long long address;
      if (args[p->index] == Py_None)
        goto slow;
      if (!call_method_int(args[p->index], name_data_ptr, &address))
        return NULL;
      if (p->aligned && (address & 15))
        goto slow;
      if (p->kind == POINTER) {
        values[i] = (uint64_t)address;
      } else {
        EncodedMap *known = &self->maps[p->map];
        if (known->address != (unsigned long long)address) {
          CUresult code = encode(&known->map, &self->specs[p->map], address);
          known->address = code == CUDA_SUCCESS ? (unsigned long long)address : 0;
          if (code != CUDA_SUCCESS)
            return raise_driver_error("cuTensorMapEncodeTiled", code);
        }
        maps[p->map] = known->map; // another thread may encode it anew while this one launches
        pointers[i] = &maps[p->map];
      }
    }
  }
  uint64_t no_scratch = 0;
  pointers[self->n_params] = pointers[self->n_params + 1] = &no_scratch;

  long programs = self->programs;
  if (programs < 0) {
    programs = PyLong_AsLong(args[n - 1]);
    if (programs == -1 && PyErr_Occurred())
      return NULL;
  }
  if (programs <= 0)
    Py_RETURN_NONE;
  PyObject *stream = PyObject_CallOneArg(stream_of, self->index);
  if (!stream)
    return NULL;
  CUlaunchAttribute attributes[4];
  memset(attributes, 0, sizeof(attributes));
  CUlaunchConfig config;
  memset(&config, 0, sizeof(config));
  config.gridDimX = (unsigned)programs * self->num_ctas;
  config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1;
  config.blockDimX = self->threads;
  config.sharedMemBytes = self->shared;
  config.hStream = (CUstream)PyLong_AsVoidPtr(stream);
  config.attrs = attributes;
  Py_DECREF(stream);
  if (PyErr_Occurred())
    return NULL;
  if (self->pdl) {
    attributes[config.numAttrs].id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    attributes[config.numAttrs++].value.programmaticStreamSerializationAllowed = 1;
  }
  if (self->cooperative) {
    attributes[config.numAttrs].id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
    attributes[config.numAttrs++].value.cooperative = 1;
  }
  if (self->num_ctas != 1) {
    attributes[config.numAttrs].id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
    attributes[config.numAttrs].value.clusterDim.x = self->num_ctas;
    attributes[config.numAttrs].value.clusterDim.y = 1;
    attributes[config.numAttrs++].value.clusterDim.z = 1;
    attributes[config.numAttrs].id = CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE;
    attributes[config.numAttrs++].value.clusterSchedulingPolicyPreference = CU_CLUSTER_SCHEDULING_POLICY_SPREAD;
  }
  CUresult code;
  CUfunction function = self->function;
  PyObject *constants = self->fixed; // `unbind` may come meanwhile
  Py_INCREF(constants);
  Py_BEGIN_ALLOW_THREADS;
  code = driver.launch(&config, function, pointers, NULL);
  Py_END_ALLOW_THREADS;
  Py_DECREF(constants);
  if (code != CUDA_SUCCESS)
    return raise_driver_error("cuLaunchKernelEx", code);
  Py_RETURN_NONE;

slow:;
  PyObject *with_self[MAX_ARGS + 1];
  if (n > MAX_ARGS) {
    PyErr_Format(PyExc_TypeError, "a launch takes at most %d arguments, not %zd", MAX_ARGS, n);
    return NULL;
  }
  with_self[0] = callable;
  memcpy(with_self + 1, args, n * sizeof(PyObject *));
  return PyObject_Vectorcall(self->slow, with_self, n + 1, NULL);
}

static int launch_init(PyObject *object, PyObject *args, PyObject *kwargs) {
  Launch *self = (Launch *)object;
  PyObject *slow;
  if (!PyArg_ParseTuple(args, "O", &slow))
    return -1;
  Py_INCREF(slow);
  Py_XSETREF(self->slow, slow);
  self->vectorcall = launch_call;
  return 0;
}

static bool ints(PyObject *tuple, int n, cuuint64_t *into) {
  if (!PyTuple_Check(tuple) || PyTuple_GET_SIZE(tuple) != n || n > 5) {
    PyErr_SetString(PyExc_TypeError, "a tensor map has tuples of at most 5 sizes");
    return false;
  }
  for (int i = 0; i < n; i++)
    into[i] = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(tuple, i));
  return !PyErr_Occurred();
}

// bind(device, function, programs, threads, num_ctas, shared, cooperative, pdl, n_args, none, fixed, params)
//
// none: the arguments that are None. fixed: the bytes of all constants. params, in the kernel's order:
// ("pointer", argument, aligned), ("fixed", offset), ("number", argument, bytes), or
// ("map", argument, type, swizzle, fill, dims, strides, box), with the fastest dimension first.
static PyObject *launch_bind(PyObject *object, PyObject *args) {
  Launch *self = (Launch *)object;
  PyObject *none, *fixed, *params, *index;
  unsigned long long function;
  if (self->bound) {
    PyErr_SetString(PyExc_ValueError, "this launch is bound");
    return NULL;
  }
  if (!PyArg_ParseTuple(args, "O!KiIiIppiO!SO!", &PyLong_Type, &index, &function, &self->programs, &self->threads,
                        &self->num_ctas, &self->shared, &self->cooperative, &self->pdl, &self->n_args, &PyTuple_Type,
                        &none, &fixed, &PyTuple_Type, &params))
    return NULL;
  if (PyTuple_GET_SIZE(params) > MAX_PARAMS || self->n_args > MAX_ARGS)
    return PyErr_Format(PyExc_ValueError, "a launch has at most %d parameters", MAX_PARAMS);
  self->device = (int)PyLong_AsLong(index);
  self->function = (CUfunction)(uintptr_t)function;
  memset(self->none, 0, sizeof(self->none));
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(none); i++) {
    long which = PyLong_AsLong(PyTuple_GET_ITEM(none, i));
    if (which < 0 || which >= self->n_args)
      return PyErr_Format(PyExc_ValueError, "there is no argument %ld", which);
    self->none[which] = true;
  }
  self->n_maps = 0;
  self->n_params = (int)PyTuple_GET_SIZE(params);
  for (int i = 0; i < self->n_params; i++) {
    PyObject *param = PyTuple_GET_ITEM(params, i);
    Param *p = &self->params[i];
    const char *kind = PyTuple_Check(param) ? PyUnicode_AsUTF8(PyTuple_GET_ITEM(param, 0)) : NULL;
    const char *name;
    if (!kind)
      return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_TypeError, "a parameter is a tuple");
    int aligned = 0;
    memset(p, 0, sizeof(*p));
    if (!strcmp(kind, "pointer")) {
      p->kind = POINTER;
      if (!PyArg_ParseTuple(param, "sip", &name, &p->index, &aligned))
        return NULL;
      p->aligned = aligned;
    } else if (!strcmp(kind, "fixed")) {
      p->kind = FIXED;
      if (!PyArg_ParseTuple(param, "si", &name, &p->index))
        return NULL;
      if (p->index < 0 || p->index + 8 > PyBytes_GET_SIZE(fixed))
        return PyErr_Format(PyExc_ValueError, "a constant lies outside of its bytes");
      continue;
    } else if (!strcmp(kind, "number")) {
      p->kind = NUMBER;
      if (!PyArg_ParseTuple(param, "sii", &name, &p->index, &p->size))
        return NULL;
    } else {
      if (self->n_maps == MAX_MAPS)
        return PyErr_Format(PyExc_ValueError, "a launch has at most %d tensor maps", MAX_MAPS);
      MapSpec *s = &self->specs[self->n_maps];
      PyObject *dims, *strides, *box;
      cuuint64_t sizes[5];
      int type, swizzle, fill;
      if (!PyArg_ParseTuple(param, "siiiiOOO", &name, &p->index, &type, &swizzle, &fill, &dims, &strides, &box))
        return NULL;
      s->rank = (cuuint32_t)PyObject_Length(dims);
      if (PyErr_Occurred() || !ints(dims, s->rank, s->dims) || !ints(strides, s->rank, s->strides) ||
          !ints(box, s->rank, sizes))
        return NULL;
      for (cuuint32_t k = 0; k < s->rank; k++)
        s->box[k] = (cuuint32_t)sizes[k];
      s->type = type;
      s->swizzle = swizzle;
      s->fill = fill;
      p->kind = MAP;
      p->aligned = true;
      p->map = self->n_maps++;
    }
    if (p->index < 0 || p->index >= self->n_args)
      return PyErr_Format(PyExc_ValueError, "there is no argument %d", p->index);
  }
  free(self->maps);
  self->maps = NULL;
  if (self->n_maps && posix_memalign((void **)&self->maps, 64, self->n_maps * sizeof(EncodedMap)))
    return PyErr_NoMemory();
  for (int i = 0; i < self->n_maps; i++)
    self->maps[i].address = 0;
  Py_INCREF(fixed);
  Py_XSETREF(self->fixed, fixed);
  Py_INCREF(index);
  Py_XSETREF(self->index, index);
  self->bound = true;
  Py_RETURN_NONE;
}

// unbind(): the next call takes the slow way.
static PyObject *launch_unbind(PyObject *object, PyObject *unused) {
  ((Launch *)object)->bound = false;
  Py_RETURN_NONE;
}

static int launch_traverse(PyObject *object, visitproc visit, void *arg) {
  Launch *self = (Launch *)object;
  Py_VISIT(self->slow);
  return 0;
}

static int launch_clear(PyObject *object) {
  Launch *self = (Launch *)object;
  Py_CLEAR(self->slow);
  Py_CLEAR(self->fixed);
  Py_CLEAR(self->index);
  return 0;
}

static void launch_dealloc(PyObject *object) {
  PyObject_GC_UnTrack(object);
  if (((Launch *)object)->weakrefs)
    PyObject_ClearWeakRefs(object);
  launch_clear(object);
  free(((Launch *)object)->maps);
  Py_TYPE(object)->tp_free(object);
}

static PyObject *launch_is_bound(PyObject *object, void *closure) { return PyBool_FromLong(((Launch *)object)->bound); }

static PyMethodDef launch_methods[] = {{"bind", launch_bind, METH_VARARGS, "Set the compiled kernel."},
                                      {"unbind", launch_unbind, METH_NOARGS, "Forget it."},
                                      {NULL}};
static PyGetSetDef launch_properties[] = {{"bound", launch_is_bound, NULL, "Whether a kernel is set."}, {NULL}};

static PyTypeObject LaunchType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "rooftile_native.Launch",
    .tp_basicsize = sizeof(Launch),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_new = PyType_GenericNew,
    .tp_init = launch_init,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(Launch, vectorcall),
    .tp_weaklistoffset = offsetof(Launch, weakrefs),
    .tp_traverse = launch_traverse,
    .tp_clear = launch_clear,
    .tp_dealloc = launch_dealloc,
    .tp_methods = launch_methods,
    .tp_getset = launch_properties,
};

// ---------------------------------------------------------------------------------------------------------------------
// Calls: prepared calls of an op, by everything about the arguments that a call may depend on

static PyObject *tensor_types; // those without a behaviour of their own
static PyObject *quiet;        // ((callable, its result where nobody wants to see ops), ...)
static PyObject *grad_enabled;
static PyObject *dtype_type;
static PyObject *forward_ad; // the dictionary of torch.autograd.forward_ad
static PyObject *name_level;

typedef struct {
  PyObject_HEAD
  PyObject *known; // {key: (what was stored,)}
} Calls;

typedef struct {
  char bytes[MAX_KEY];
  Py_ssize_t size;
  int device; // of the first tensor; -1: none yet
  bool requires_grad;
} Key;

static bool put(Key *key, const void *bytes, Py_ssize_t n) {
  if (key->size + n > MAX_KEY)
    return false;
  memcpy(key->bytes + key->size, bytes, n);
  key->size += n;
  return true;
}

static bool put_int(Key *key, char kind, long long value) { return put(key, &kind, 1) && put(key, &value, 8); }

static bool put_ints(Key *key, PyObject *sizes) {
  if (!sizes)
    return false;
  bool ok = PyTuple_Check(sizes) && put_int(key, 'n', PyTuple_GET_SIZE(sizes));
  for (Py_ssize_t i = 0; ok && i < PyTuple_GET_SIZE(sizes); i++) {
    long long value = PyLong_AsLongLong(PyTuple_GET_ITEM(sizes, i));
    ok = !(value == -1 && PyErr_Occurred()) && put(key, &value, 8);
  }
  Py_DECREF(sizes);
  return ok;
}

static bool is_true_and_release(PyObject *flag) {
  bool yes = flag == Py_True;
  Py_XDECREF(flag);
  return yes;
}

static bool put_tensor(Key *key, PyObject *tensor) {
  long long device, address;
  if (!call_method_int(tensor, name_get_device, &device) || device < 0 ||
      !call_method_int(tensor, name_data_ptr, &address))
    return false;
  if (key->device < 0)
    key->device = (int)device;
  PyObject *dtype = PyObject_GetAttr(tensor, name_dtype);
  if (!dtype)
    return false;
  Py_DECREF(dtype); // PyTorch holds every dtype
  if (!put_int(key, 't', (long long)(intptr_t)dtype) || !put_int(key, (char)(address & 15), device * 2 + !address))
    return false;
  if (!put_ints(key, PyObject_GetAttr(tensor, name_shape)) ||
      !put_ints(key, PyObject_CallMethodNoArgs(tensor, name_stride)))
    return false;
  PyObject *negated = PyObject_CallMethodNoArgs(tensor, name_is_neg);
  if (!negated || is_true_and_release(negated))
    return false;
  if (!key->requires_grad)
    key->requires_grad = is_true_and_release(PyObject_GetAttr(tensor, name_requires_grad));
  return true;
}

static bool put_argument(Key *key, PyObject *value) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tensor_types); i++)
    if ((PyObject *)Py_TYPE(value) == PyTuple_GET_ITEM(tensor_types, i))
      return put_tensor(key, value);
  if (value == Py_None)
    return put(key, "N", 1);
  if (PyBool_Check(value))
    return put(key, value == Py_True ? "T" : "F", 1);
  if (PyLong_CheckExact(value)) {
    long long number = PyLong_AsLongLong(value);
    return !(number == -1 && PyErr_Occurred()) && put_int(key, 'i', number);
  }
  if (PyFloat_CheckExact(value)) {
    double number = PyFloat_AS_DOUBLE(value);
    return put(key, "f", 1) && put(key, &number, 8);
  }
  if (PyUnicode_CheckExact(value)) {
    Py_ssize_t n;
    const char *text = PyUnicode_AsUTF8AndSize(value, &n);
    return text && put_int(key, 's', n) && put(key, text, n);
  }
  if ((PyObject *)Py_TYPE(value) == dtype_type)
    return put_int(key, 'd', (long long)(intptr_t)value);
  if (PyList_CheckExact(value) || PyTuple_CheckExact(value)) {
    Py_ssize_t n = PySequence_Fast_GET_SIZE(value);
    if (!put_int(key, 'l', n))
      return false;
    for (Py_ssize_t i = 0; i < n; i++)
      if (!put_argument(key, PySequence_Fast_GET_ITEM(value, i)))
        return false;
    return true;
  }
  return false;
}

// The key of those arguments; NULL, with no exception, where they have none: subclasses, other devices, other types.
static PyObject *key_of(Key *key, PyObject *const *args, Py_ssize_t n) {
  key->size = 0;
  key->device = -1;
  key->requires_grad = false;
  for (Py_ssize_t i = 0; i < n; i++) {
    if (!put_argument(key, args[i])) {
      PyErr_Clear();
      return NULL;
    }
  }
  return PyBytes_FromStringAndSize(key->bytes, key->size);
}

// 1: an op may be called past PyTorch's dispatcher; 0: somebody wants to see it; -1: an exception.
static int is_quiet(void) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(quiet); i++) {
    PyObject *pair = PyTuple_GET_ITEM(quiet, i);
    PyObject *result = PyObject_CallNoArgs(PyTuple_GET_ITEM(pair, 0));
    if (!result)
      return -1;
    bool same = result == PyTuple_GET_ITEM(pair, 1); // None, False and 0 are one object each
    Py_DECREF(result);
    if (!same)
      return 0;
  }
  PyObject *level = PyDict_GetItem(forward_ad, name_level); // -1 outside of forward-mode differentiation
  return level && PyLong_AsLong(level) < 0;
}

static PyObject *look_up(Calls *self, PyObject *const *args, Py_ssize_t n, bool without_gradients) {
  Key key;
  PyObject *bytes = key_of(&key, args, n);
  if (!bytes) {
    if (PyErr_Occurred())
      return NULL;
    Py_RETURN_NONE;
  }
  PyObject *found = PyDict_GetItemWithError(self->known, bytes);
  Py_DECREF(bytes);
  if (!found) {
    if (PyErr_Occurred())
      return NULL;
    Py_RETURN_NONE;
  }
  if (!is_current(key.device))
    Py_RETURN_NONE;
  if (!without_gradients || !key.requires_grad) {
    found = PyTuple_GET_ITEM(found, 0);
    Py_INCREF(found);
    return found;
  }
  Py_INCREF(found);
  PyObject *enabled = PyObject_CallNoArgs(grad_enabled);
  if (enabled && !is_true_and_release(enabled)) {
    PyObject *run = PyTuple_GET_ITEM(found, 0);
    Py_INCREF(run);
    Py_DECREF(found);
    return run;
  }
  if (!enabled)
    Py_CLEAR(found);
  return found;
}

// get(*args): as `find`, for who is below autograd, where nobody else is to see the call.
static PyObject *calls_get(PyObject *object, PyObject *const *args, Py_ssize_t n) {
  return look_up((Calls *)object, args, n, false);
}

// find(*args): what was stored for such arguments, in a tuple where a gradient is wanted; None where there is nothing,
// somebody wants to see ops, or the device is not the current one.
static PyObject *calls_find(PyObject *object, PyObject *const *args, Py_ssize_t n) {
  int alone = is_quiet();
  if (alone < 0)
    return NULL;
  if (!alone)
    Py_RETURN_NONE;
  return look_up((Calls *)object, args, n, true);
}

// store(run, *args): from now on what `find` gives for such arguments, where they have a key.
static PyObject *calls_store(PyObject *object, PyObject *const *args, Py_ssize_t n) {
  Key key;
  PyObject *bytes = n ? key_of(&key, args + 1, n - 1) : NULL;
  if (!bytes) {
    if (PyErr_Occurred())
      return NULL;
    Py_RETURN_FALSE;
  }
  PyObject *kept = PyTuple_Pack(1, args[0]);
  int failed = kept ? PyDict_SetItem(((Calls *)object)->known, bytes, kept) : -1;
  Py_XDECREF(kept);
  Py_DECREF(bytes);
  if (failed)
    return NULL;
  Py_RETURN_TRUE;
}

static PyObject *calls_clear_known(PyObject *object, PyObject *unused) {
  PyDict_Clear(((Calls *)object)->known);
  Py_RETURN_NONE;
}

static Py_ssize_t calls_length(PyObject *object) { return PyDict_GET_SIZE(((Calls *)object)->known); }

static int calls_init(PyObject *object, PyObject *args, PyObject *kwargs) {
  PyObject *known = PyDict_New();
  if (!known)
    return -1;
  Py_XSETREF(((Calls *)object)->known, known);
  return 0;
}

static int calls_traverse(PyObject *object, visitproc visit, void *arg) {
  Py_VISIT(((Calls *)object)->known);
  return 0;
}

static int calls_clear(PyObject *object) {
  Py_CLEAR(((Calls *)object)->known);
  return 0;
}

static void calls_dealloc(PyObject *object) {
  PyObject_GC_UnTrack(object);
  calls_clear(object);
  Py_TYPE(object)->tp_free(object);
}

static PyMethodDef calls_methods[] = {
    {"find", (PyCFunction)(void (*)(void))calls_find, METH_FASTCALL, "What was stored for such arguments, or None."},
    {"get", (PyCFunction)(void (*)(void))calls_get, METH_FASTCALL, "The same, whoever wants to see ops."},
    {"store", (PyCFunction)(void (*)(void))calls_store, METH_FASTCALL, "store(run, *args): whether they have a key."},
    {"clear", calls_clear_known, METH_NOARGS, "Forget everything."},
    {NULL}};
static PySequenceMethods calls_sequence = {.sq_length = calls_length};

static PyTypeObject CallsType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "rooftile_native.Calls",
    .tp_basicsize = sizeof(Calls),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_init = calls_init,
    .tp_traverse = calls_traverse,
    .tp_clear = calls_clear,
    .tp_dealloc = calls_dealloc,
    .tp_methods = calls_methods,
    .tp_as_sequence = &calls_sequence,
};

// ---------------------------------------------------------------------------------------------------------------------
// The module

static void set(PyObject **variable, PyObject *value) {
  Py_INCREF(value);
  Py_XSETREF(*variable, value);
}

// configure(hooks, stream_of, tensor_types, dtype_type, quiet, grad_enabled, forward_ad)
static PyObject *configure(PyObject *module, PyObject *args) {
  PyObject *of_hooks, *of_stream, *types, *dtype, *checks, *enabled, *dictionary;
  if (!PyArg_ParseTuple(args, "OOO!OO!OO!", &of_hooks, &of_stream, &PyTuple_Type, &types, &dtype, &PyTuple_Type,
                        &checks, &enabled, &PyDict_Type, &dictionary))
    return NULL;
  set(&hooks, of_hooks);
  set(&stream_of, of_stream);
  set(&tensor_types, types);
  set(&dtype_type, dtype);
  set(&quiet, checks);
  set(&grad_enabled, enabled);
  set(&forward_ad, dictionary);
  Py_RETURN_NONE;
}

// observe(change): by how many more, or fewer, every launch is to be seen from Python.
static PyObject *observe(PyObject *module, PyObject *change) {
  observed += (int)PyLong_AsLong(change);
  if (PyErr_Occurred())
    return NULL;
  Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"configure", configure, METH_VARARGS, "Set what is asked at each call."},
    {"observe", observe, METH_O, "Launch through Python, while the sum of the changes is above 0."},
    {"use_driver", use_driver, METH_O, "Set the driver's functions; None: libcuda's."},
    {NULL}};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "rooftile_native", NULL, -1, functions};

PyMODINIT_FUNC PyInit_rooftile_native(void) {
  struct {
    PyObject **variable;
    const char *text;
  } names[] = {
      {&name_data_ptr, "data_ptr"},       {&name_shape, "shape"},
      {&name_stride, "stride"},           {&name_dtype, "dtype"},
      {&name_get_device, "get_device"},   {&name_is_neg, "is_neg"},
      {&name_requires_grad, "requires_grad"}, {&name_calls, "calls"},
      {&name_enter, "launch_enter_hook"}, {&name_exit, "launch_exit_hook"},
      {&name_level, "_current_level"},
  };
  for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
    if (!(*names[i].variable = PyUnicode_InternFromString(names[i].text)))
      return NULL;
  if (PyType_Ready(&LaunchType) < 0 || PyType_Ready(&CallsType) < 0)
    return NULL;
  PyObject *module = PyModule_Create(&definition);
  if (!module)
    return NULL;
  Py_INCREF(&LaunchType);
  Py_INCREF(&CallsType);
  if (PyModule_AddObject(module, "Launch", (PyObject *)&LaunchType) < 0 ||
      PyModule_AddObject(module, "Calls", (PyObject *)&CallsType) < 0)
    return NULL;
  return module;
}
