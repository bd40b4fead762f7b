#include "fake_xla.h"

#include "check.h"

struct XLA_FFI_Error {
  std::string text;
};

struct XLA_FFI_ExecutionContext {
  CUstream stream;
};

namespace jgg {
namespace {

XLA_FFI_Error* CreateError(XLA_FFI_Error_Create_Args* args) {
  return new XLA_FFI_Error{std::to_string(args->errc) + ": " + args->message};
}

XLA_FFI_Error* GetStream(XLA_FFI_Stream_Get_Args* args) {
  args->stream = args->ctx->stream;
  return nullptr;
}

const XLA_FFI_Api& Api() {
  static const XLA_FFI_Api api = [] {
    XLA_FFI_Api a = {};
    a.struct_size = XLA_FFI_Api_STRUCT_SIZE;
    a.XLA_FFI_Error_Create = CreateError;
    a.XLA_FFI_Stream_Get = GetStream;
    return a;
  }();
  return api;
}

XLA_FFI_CallFrame EmptyFrame() {
  XLA_FFI_CallFrame frame = {};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = &Api();
  frame.args.struct_size = XLA_FFI_Args_STRUCT_SIZE;
  frame.rets.struct_size = XLA_FFI_Rets_STRUCT_SIZE;
  frame.attrs.struct_size = XLA_FFI_Attrs_STRUCT_SIZE;
  return frame;
}

std::string Take(XLA_FFI_Error* error) {
  if (error == nullptr) return "";
  std::string text = error->text;
  delete error;
  return text;
}

std::vector<XLA_FFI_Buffer> Buffers(std::vector<FakeBuffer>& buffers) {
  std::vector<XLA_FFI_Buffer> result;
  for (FakeBuffer& b : buffers) {
    result.push_back({XLA_FFI_Buffer_STRUCT_SIZE, nullptr, b.dtype,
                      reinterpret_cast<void*>(b.address), static_cast<int64_t>(b.dims.size()),
                      b.dims.data()});
  }
  return result;
}

template <typename T>
std::vector<void*> Pointers(std::vector<T>& values) {
  std::vector<void*> result;
  for (T& value : values) result.push_back(&value);
  return result;
}

}  // namespace

std::string Call(XLA_FFI_Handler* handler, XLA_FFI_ExecutionStage stage, FakeCall call) {
  XLA_FFI_ExecutionContext context{call.stream};
  XLA_FFI_CallFrame frame = EmptyFrame();
  frame.ctx = &context;
  frame.stage = stage;

  std::vector<XLA_FFI_Buffer> args = Buffers(call.args), rets = Buffers(call.rets);
  std::vector<void*> arg_pointers = Pointers(args), ret_pointers = Pointers(rets);
  std::vector<XLA_FFI_ArgType> arg_types(args.size(), XLA_FFI_ArgType_BUFFER);
  std::vector<XLA_FFI_RetType> ret_types(rets.size(), XLA_FFI_RetType_BUFFER);
  frame.args.size = args.size();
  frame.args.types = arg_types.data();
  frame.args.args = arg_pointers.data();
  frame.rets.size = rets.size();
  frame.rets.types = ret_types.data();
  frame.rets.rets = ret_pointers.data();

  std::deque<XLA_FFI_ByteSpan> names, strings;
  std::deque<XLA_FFI_Scalar> scalars;
  std::vector<XLA_FFI_ByteSpan*> name_pointers;
  std::vector<XLA_FFI_AttrType> types;
  std::vector<void*> values;
  for (auto& [name, value] : call.attributes) {
    name_pointers.push_back(&names.emplace_back(XLA_FFI_ByteSpan{name.data(), name.size()}));
    if (auto* text = std::get_if<std::string>(&value)) {
      types.push_back(XLA_FFI_AttrType_STRING);
      values.push_back(&strings.emplace_back(XLA_FFI_ByteSpan{text->data(), text->size()}));
    } else if (auto* flag = std::get_if<bool>(&value)) {
      types.push_back(XLA_FFI_AttrType_SCALAR);
      values.push_back(&scalars.emplace_back(XLA_FFI_Scalar{XLA_FFI_DataType_PRED, flag}));
    } else {
      types.push_back(XLA_FFI_AttrType_SCALAR);
      values.push_back(&scalars.emplace_back(
          XLA_FFI_Scalar{XLA_FFI_DataType_S64, std::get_if<int64_t>(&value)}));
    }
  }
  frame.attrs.size = values.size();
  frame.attrs.types = types.data();
  frame.attrs.names = name_pointers.data();
  frame.attrs.attrs = values.data();
  return Take(handler(&frame));
}

void CheckRefusals(XLA_FFI_Handler* handler, XLA_FFI_ExecutionStage stage, const FakeCall& call,
                   const std::vector<Refusal>& refusals) {
  for (const Refusal& refusal : refusals) {
    FakeCall spoilt = call;
    refusal.spoil(spoilt);
    CHECK_CONTAINS(Call(handler, stage, spoilt), refusal.part);
  }
}

XLA_FFI_Metadata MetadataOf(XLA_FFI_Handler* handler) {
  XLA_FFI_Metadata metadata = {};
  metadata.struct_size = XLA_FFI_Metadata_STRUCT_SIZE;
  XLA_FFI_Metadata_Extension extension = {};
  extension.extension_base.struct_size = sizeof(extension);
  extension.extension_base.type = XLA_FFI_Extension_Metadata;
  extension.metadata = &metadata;
  XLA_FFI_CallFrame frame = EmptyFrame();
  frame.extension_start = &extension.extension_base;
  Take(handler(&frame));
  return metadata;
}

}  // namespace jgg
